# SPDX-License-Identifier: Apache-2.0
"""A host with different models of boards: all are used, and what is compared stays on one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_llenergy.report import store

from ..compare.runs import record_of
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import Board, World
from .lockers import MakeLocker
from .test_run_leases import run

pytestmark = pytest.mark.usefixtures("locks")

Read = Callable[..., dict[str, Any]]


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200"), Board(name="NVIDIA L4")]))


@pytest.mark.slow
def test_a_test_gets_the_model_of_its_baseline(
    pytester: pytest.Pytester, world: World, make: MakeLocker, read_report: Read
) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpus(1)\ndef test_it(energy_meter):\n"
        "    with energy_meter('x'):\n        pass\n"
    )
    holder = make()
    holder.take(world.board(0).uuid)
    run(pytester, "--energy-report=base.json").assert_outcomes(passed=1)
    holder.release()
    # Ranks, which would measure rounds, need a real board.
    stored = store.read_report(pytester.path / "base.json")
    with_rounds = replace(stored.records[0], status="measured", rounds=record_of().rounds)
    store.write_report(replace(stored, records=[with_rounds]), pytester.path / "base.json")

    def model(*args: str) -> str:
        run(pytester, "--energy-report", *args).assert_outcomes(passed=1)
        return str(read_report()["records"][0]["boards"][0]["name"])

    assert stored.records[0].boards[0].name == "NVIDIA L4"
    assert model() == "NVIDIA H200"
    assert model("--energy-compare=base.json") == "NVIDIA L4"


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
    for extra in ((), ("-n1",)):
        run(pytester, "-p", "pytest_llenergy.ab.session_plugin", *extra).assert_outcomes(passed=2)
