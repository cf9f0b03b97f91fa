# SPDX-License-Identifier: Apache-2.0
"""The counters of boards are checked while tests are collected, so that no test waits for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pytest_llenergy.energy import check_ahead

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

SUITE = """
    def test_one(energy):
        energy(lambda: sum(range(100_000)))
"""

#: Collection that lasts until every board was checked, or for 20 s.
SLOW_COLLECTION = """
    import os, time
    from pathlib import Path

    def pytest_collection_modifyitems():
        folder = Path(os.environ["LLENERGY_CACHE_DIR"]) / "meters"
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s and len(list(folder.glob("nvml-*.json"))) < BOARDS:
            # Another process writes the files.
            time.sleep(0.05)
        print(sorted(path.name for path in folder.glob("nvml-*.json")))
"""

QUICK = ("--energy-rounds=2", "--energy-warmup=0", "--energy-budget=0.1")


@pytest.fixture
def boards(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(), Board()]))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    pytester.makepyfile(SUITE)
    return pytester.runpytest_subprocess(*QUICK, *args)


def test_boards_are_checked_during_collection(pytester: pytest.Pytester, boards: World) -> None:
    pytester.makeconftest(SLOW_COLLECTION.replace("BOARDS", "2"))
    result = run(pytester, "--energy-report=energy.json", "-s")
    result.assert_outcomes(passed=1)
    names = [f"nvml-{boards.board(index).uuid}.json" for index in range(2)]
    result.stdout.fnmatch_lines([f"*{sorted(names)}*".replace("[", "[[]")])


def test_only_visible_boards_are_checked(
    pytester: pytest.Pytester, boards: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run(pytester, "--energy-report=energy.json").assert_outcomes(passed=1)
    found = list((Path(os.environ["LLENERGY_CACHE_DIR"]) / "meters").glob("nvml-*"))
    assert [path.stem for path in found] == [f"nvml-{boards.board(1).uuid}"]


def test_the_check_leaves_warnings_of_other_tests_alone(pytester: pytest.Pytester, boards: World) -> None:
    pytester.makepyfile(
        """
        import warnings
        import pytest

        @pytest.mark.parametrize("number", range(30))
        def test_warns(number):
            with pytest.warns(UserWarning):
                warnings.warn("expected")
            warnings.warn(f"number {number}")
        """
    )
    result = pytester.runpytest_subprocess("--energy-report=energy.json")
    result.assert_outcomes(passed=30, warnings=30)


def test_a_test_that_measures_is_enough(pytester: pytest.Pytester, boards: World) -> None:
    run(pytester).assert_outcomes(passed=1)
    assert len(list((Path(os.environ["LLENERGY_CACHE_DIR"]) / "meters").glob("nvml-*"))) == 2


def test_a_check_that_hangs_is_given_up(boards: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a driver that never answers.
    monkeypatch.setattr(check_ahead, "PROGRAM", "import time\ntime.sleep(600)")
    monkeypatch.setattr(check_ahead, "CHECK_AHEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(check_ahead, "PROGRAM_END_TIMEOUT_S", 60.0)
    started = check_ahead.CounterCheck(None, os.environ)
    process = started._process
    assert process is not None
    started.wait()
    assert process.returncode == -signal.SIGKILL
    # Further calls do nothing.
    started.wait()
    started.stop()


@pytest.mark.parametrize("args", [("--collect-only",), ("--energy-meter=estimate",)])
def test_boards_that_no_test_measures_are_left_alone(
    pytester: pytest.Pytester, boards: World, args: tuple[str, ...]
) -> None:
    result = run(pytester, "--energy-report=energy.json", *args)
    assert result.ret == 0
    assert not (Path(os.environ["LLENERGY_CACHE_DIR"]) / "meters").exists()
