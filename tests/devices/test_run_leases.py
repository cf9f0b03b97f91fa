# SPDX-License-Identifier: Apache-2.0
"""Leases of tests: under xdist, and while other processes hold devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import Board, World
from .lockers import MakeLocker, lockers


@pytest.fixture
def make() -> Iterator[MakeLocker]:
    with lockers() as made:
        yield made


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200"), Board(name="NVIDIA H200")]))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    # A separate process, because a loaded driver library cannot be replaced.
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", *args)


def spans(pytester: pytest.Pytester, *args: str, together: bool = False) -> list[list[float]]:
    """Return start and end of two sleeping tests: one on a GPU, one as selected by ``args``.

    With ``together``, each goes on until the other has started, whenever the busy machine starts that.
    """
    pytester.makepyfile(
        f"""
        import json, pathlib, time, pytest
        def sleep(name):
            start = time.monotonic()
            pathlib.Path(name + ".begun").touch()
            time.sleep(0.6)
            while {together} and len([*pathlib.Path().glob("*.begun")]) < 2:
                assert time.monotonic() < start + 60
                time.sleep(0.01)
            pathlib.Path(name).write_text(json.dumps([start, time.monotonic()]))
        @pytest.mark.gpus(1)
        def test_gpu(gpus):
            sleep("one")
        def test_cpu(gpus):
            sleep("two")
        @pytest.mark.gpus(1)
        def test_other_gpu(gpus):
            sleep("two")
        """
    )
    run(pytester, "-n2", *args).assert_outcomes(passed=2)
    return sorted(json.loads((pytester.path / name).read_text()) for name in ("one", "two"))


def test_tests_of_gpus_run_concurrently(pytester: pytest.Pytester, world: World) -> None:
    (_, end_s), (start_s, _) = spans(pytester, "-k", "test_gpu or test_other_gpu", together=True)
    assert start_s < end_s


def test_a_meter_of_the_whole_host_runs_gpu_tests_one_by_one(pytester: pytest.Pytester, world: World) -> None:
    (_, end_s), (start_s, _) = spans(
        pytester, "-k", "test_gpu or test_other_gpu", "--energy-meter=nvml,command:yes 5"
    )
    assert start_s >= end_s


def test_a_lock_file_removed_during_a_test_is_flagged(
    pytester: pytest.Pytester, world: World, read_report: Callable[..., dict[str, Any]]
) -> None:
    pytester.makepyfile(
        """
        import os, pathlib, time, pytest
        @pytest.mark.gpus(1)
        @pytest.mark.parametrize("removed", [False, True])
        def test_it(energy_meter, removed):
            with energy_meter("w"):
                time.sleep(0.05)
            for file in pathlib.Path(os.environ["LLENERGY_LOCK_DIR"]).glob("*.lock"):
                if removed:
                    file.unlink()
        """
    )
    run(pytester, "--energy-report").assert_outcomes(passed=2)
    flags = [{flag["name"] for flag in record["flags"]} for record in read_report()["records"]]
    assert ["lease-lost" in each for each in flags] == [False, True]


def test_a_board_held_elsewhere_is_not_leased(
    pytester: pytest.Pytester, world: World, make: MakeLocker
) -> None:
    make().take(world.board(0).uuid)
    pytester.makepyfile(
        f"""
        import pytest
        @pytest.mark.gpus(1)
        def test_it(gpus):
            assert (gpus.uuids, gpus.indices) == (("{world.board(1).uuid}",), (1,))
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_a_session_of_ab_uses_the_boards_of_earlier_sessions(
    pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = world.board(1).uuid
    files = {"DONE": "[]", "DEVICES": f'{{"test_ab.py::test_it": ["{second}"]}}'}
    for name in ("DONE", "DEVICES", "MODULES", "ROOT", "SUMMARY"):
        path = pytester.path / name.lower()
        monkeypatch.setenv(f"LLENERGY_AB_{name}", str(path))
        if name in files:
            path.write_text(files[name])
    pytester.makepyfile(
        test_ab=f"""
        import pytest
        @pytest.mark.gpus(1)
        def test_it(gpus):
            assert gpus.uuids == ("{second}",)
        @pytest.mark.gpus(1)
        def test_new(gpus):
            assert gpus.uuids == ("{world.board(0).uuid}",)
        """
    )
    run(pytester, "-p", "pytest_llenergy.ab.session_plugin").assert_outcomes(passed=2)
