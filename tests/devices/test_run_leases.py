# SPDX-License-Identifier: Apache-2.0
"""Leases of tests under xdist, under llenergy ab, and without their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import Board, World


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200"), Board(name="NVIDIA H200")]))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    # A separate process, because a loaded driver library cannot be replaced.
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", *args)


def test_a_meter_of_the_whole_host_runs_gpu_tests_one_by_one(pytester: pytest.Pytester, world: World) -> None:
    pytester.makepyfile(
        """
        import json, pathlib, time, pytest
        @pytest.mark.gpus(1)
        @pytest.mark.parametrize("name", ["one", "two"])
        def test_it(gpus, name):
            start = time.monotonic()
            time.sleep(0.6)
            pathlib.Path(name).write_text(json.dumps([start, time.monotonic()]))
        """
    )
    run(pytester, "-n2", "--energy-meter=nvml,command:yes 5").assert_outcomes(passed=2)
    spans = sorted(json.loads((pytester.path / name).read_text()) for name in ("one", "two"))
    assert spans[1][0] >= spans[0][1]


def test_a_session_of_ab_uses_the_boards_of_earlier_sessions(
    pytester: pytest.Pytester, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = world.board(1).uuid
    earlier = {"done": [], "devices": {"test_ab.py::test_it": [second]}, "own": {}}
    (pytester.path / "earlier.json").write_text(json.dumps(earlier))
    monkeypatch.setenv("LLENERGY_AB_SESSION", str(pytester.path))
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
