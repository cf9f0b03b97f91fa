# SPDX-License-Identifier: Apache-2.0
"""Runs under pytest-xdist: the controller has all records, also after a worker crash."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.allocation import count_leasable

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

Read = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.usefixtures("few_plugins")

SUITE = """
import time, pytest
@pytest.mark.parametrize("i", range(4))
def test_it(energy, i):
    energy(time.sleep, 0.05)
def test_other():
    pass
def test_skips(energy):
    pytest.skip("not here")
"""

#: Fields that may differ between two runs of the same test.
VOLATILE = {
    "rounds",
    "metrics",
    "load_average",
    "flags",
    "start_s",
    "lease_wait_s",
    "procedure",
    "times",
}


def stable(report: dict[str, Any]) -> list[dict[str, Any]]:
    records = [{k: v for k, v in record.items() if k not in VOLATILE} for record in report["records"]]
    return sorted(records, key=lambda record: str(record["id"]))


@pytest.mark.parametrize(
    ("options", "chunk"),
    [([], None), (["--energy-report"], 1), (["--energy-report", "--maxschedchunk=7"], 7)],
    ids=["keeps nothing", "keeps energy", "given"],
)
def test_a_waiting_worker_holds_no_tests_of_others(
    quick: pytest.Pytester, options: list[str], chunk: int | None
) -> None:
    quick.makepyfile("def test_it(): pass")
    quick.makeconftest(
        "def pytest_terminal_summary(terminalreporter, config):\n"
        "    terminalreporter.line(f'chunk: {config.option.maxschedchunk}')\n"
    )
    quick.runpytest("-n1", *options).stdout.fnmatch_lines([f"chunk: {chunk}"])


@pytest.mark.parametrize(
    "dist", ["load", *(pytest.param(dist, marks=pytest.mark.slow) for dist in ("loadfile", "worksteal"))]
)
def test_records_are_the_same_with_workers_and_never_overlap(
    quick: pytest.Pytester, read_report: Read, dist: str
) -> None:
    quick.makepyfile(SUITE)
    quick.runpytest("--energy-report=one.json").assert_outcomes(passed=5, skipped=1)
    result = quick.runpytest("--energy-report=two.json", "-n2", f"--dist={dist}")
    result.assert_outcomes(passed=5, skipped=1)
    one, two = read_report("one.json"), read_report("two.json")
    assert len(one["records"]) == 5
    assert stable(one) == stable(two)
    assert all(len(record["rounds"]) == 2 for record in two["records"] if record["status"] == "measured")
    assert result.stdout.str().count("measured by ten-watts") == 1, "one table, from the controller"
    # The CPU is leased like a GPU: workers that measured at once would count each other's energy.
    measurements = sorted(
        (record["rounds"][0]["start_s"], record["rounds"][-1]["start_s"] + record["rounds"][-1]["duration_s"])
        for record in two["records"]
        if record["rounds"]
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(measurements))


@pytest.fixture
def boards(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board()] * 3))


class TestAuto:
    """``-n auto`` starts as many workers as can hold a lease at once."""

    @pytest.mark.parametrize(
        ("visible", "workers"),
        [
            ("0,2", 2),
            pytest.param(None, 3, marks=pytest.mark.slow),
            pytest.param("", 1, marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.slow
    def test_auto_starts_one_worker_per_visible_gpu(
        self,
        quick: pytest.Pytester,
        boards: World,
        monkeypatch: pytest.MonkeyPatch,
        visible: str | None,
        workers: int,
    ) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        quick.makepyfile("def test_it(energy):\n    energy(lambda: None)\n")
        result = quick.runpytest_subprocess("--energy-report", "-n", "auto")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"*{workers}/{workers} worker*"])

    def test_auto_counts_the_gpus_of_all_models(self, boards: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        boards.update(1, name="NVIDIA L4")
        assert count_leasable(None) == 3

    @pytest.mark.slow
    def test_environment_variable_overrides_auto(
        self, quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
        quick.makepyfile("def test_it():\n    pass\n")
        result = quick.runpytest_subprocess("--energy-report", "-n", "auto")
        result.stdout.fnmatch_lines(["*2/2 workers*"])

    def test_auto_is_unchanged_without_a_report(self, quick: pytest.Pytester) -> None:
        quick.makeconftest("def pytest_xdist_auto_num_workers(config):\n    return 3\n")
        quick.makepyfile("def test_it():\n    pass\n")
        result = quick.runpytest_subprocess("-n", "auto", "-p", "no:randomly")
        result.stdout.fnmatch_lines(["*3/3 workers*"])


def test_parameters_reach_the_controller_as_primitives(quick: pytest.Pytester, read_report: Read) -> None:
    """With any other object in a record, xdist drops the worker and exits with 0."""
    quick.makepyfile(
        """
        import decimal, enum, pathlib, pytest
        class Colour(enum.Enum):
            RED = 1
        @pytest.mark.parametrize("a", [Colour.RED, pathlib.Path("p"), decimal.Decimal("1.5"), float("nan")])
        def test_it(energy, a):
            energy(sum, [1])
        """
    )
    quick.runpytest("--energy-report", "-n1").assert_outcomes(passed=4)
    values = [record["params"]["a"] for record in read_report()["records"]]
    assert values == ["<Colour.RED: 1>", "PosixPath('p')", "Decimal('1.5')", None]


def test_invalid_options_stop_the_controller(quick: pytest.Pytester) -> None:
    quick.makepyfile(SUITE)
    result = quick.runpytest("--energy-rounds=x", "-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ['ERROR: --energy-rounds=x: needs a whole number from 1 to 1000000, or "auto"']
    )
