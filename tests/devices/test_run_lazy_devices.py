# SPDX-License-Identifier: Apache-2.0
"""The driver is not queried before a test that needs GPUs runs, and never by the xdist controller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..ranks.no_torch import without_torch

#: Records for each process at its end whether the driver's library was loaded.
WITNESS = """
from pathlib import Path

def pytest_unconfigure(config):
    who = getattr(config, "workerinput", {}).get("workerid", "main")
    loaded = "libnvidia-ml" in Path("/proc/self/maps").read_text()
    Path(__file__).with_name(f"{who}.witness").write_text(str(loaded))
"""

MEASURED = "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy): energy(sum, [1])\n"

ONE = "import pytest\n@pytest.mark.gpus(1)\ndef test_it(gpus): pass\n"

MANY = """
import pytest
@pytest.mark.gpus(2, name="H200", memory="40 GB", fallback="cpu")
@pytest.mark.parametrize("i", range(2000))
def test_it(i): pass
"""


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(), Board()]))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    pytester.makeconftest(WITNESS)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)


def loaded(pytester: pytest.Pytester) -> dict[str, bool]:
    return {path.stem: path.read_text() == "True" for path in pytester.path.glob("*.witness")}


@pytest.mark.parametrize("arg", ["--collect-only", "--fixtures"])
def test_inspecting_a_suite_does_not_count_gpus_for_workers(
    pytester: pytest.Pytester, world: World, arg: str
) -> None:
    pytester.makepyfile(ONE)
    assert run(pytester, "--energy-report", "-n", "auto", arg).ret == 0
    assert world.init_count() == 0


def test_collecting_two_thousand_tests_does_not_ask_the_driver(
    pytester: pytest.Pytester, world: World
) -> None:
    pytester.makepyfile(MANY)
    result = run(pytester, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["2000 tests collected*"])
    assert (world.init_count(), world.calls(0), world.calls(1)) == (0, 0, 0)
    assert run(pytester, "-k", "none_of_them").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert (world.init_count(), loaded(pytester)) == (0, {"main": False})


@pytest.mark.slow
def test_the_xdist_controller_does_not_query_the_driver(
    pytester: pytest.Pytester, world: World, read_report: Callable[..., dict[str, Any]]
) -> None:
    without_torch(pytester.path)
    pytester.makepyfile(MEASURED)
    quick = ("--energy-rounds=1", "--energy-warmup=0", "--energy-budget=0.1")
    run(pytester, "-n2", "--energy-report=energy.json", *quick)
    assert [board["uuid"] for board in read_report()["environment"]["gpus"]] == [
        world.board(index).uuid for index in range(2)
    ]
    assert read_report()["environment"]["driver"] == "580.95.05"
    loaded_in = loaded(pytester)
    assert not loaded_in.pop("main")
    assert sorted(loaded_in.values()) == [False, True], "only the worker that ran the test"
    assert world.calls(0) > 0
