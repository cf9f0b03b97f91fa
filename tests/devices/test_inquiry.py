# SPDX-License-Identifier: Apache-2.0
"""The driver as a process of its own tells of it, wherever that was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_llenergy.devices.query_boards import Told, ask_apart
from pytest_llenergy.devices.query_count import leasable
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION

DRIVER_NOT_LOADED = 9


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200", power_limit_w=650), Board()]))


def test_it_tells_what_the_driver_shows(world: World) -> None:
    told = ask_apart()
    assert [board.uuid for board in told.boards] == [world.board(index).uuid for index in range(2)]
    assert (told.boards[0].name, told.boards[0].power_limit_w) == ("NVIDIA H200", 650)
    assert (told.driver, told.missing) == ("580.95.05", [])


def test_without_a_driver_there_is_nothing_and_nothing_is_missing(world: World) -> None:
    world.set_init_result(DRIVER_NOT_LOADED)
    assert ask_apart() == Told()


def test_what_is_wrong_is_told_in_the_drivers_words(world: World) -> None:
    world.set_init_result(NO_PERMISSION)
    refused = "NVML: Insufficient Permissions; see nvidia-smi"
    assert ask_apart() == Told(missing=[refused])
    with pytest.raises(DeviceError) as caught:
        leasable()
    assert str(caught.value) == (
        f"the process that asks the NVIDIA driver failed: {refused}; see llenergy doctor"
    )


def test_a_board_that_is_lost_takes_none_with_it(world: World) -> None:
    world.update(0, lost=True)
    told = ask_apart()
    assert [board.uuid for board in told.boards] == [world.board(1).uuid]
    assert told.missing == ["NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi"]


@pytest.mark.parametrize("name", ["random", "token", "platform", "runpy", "msgspec", "pynvml"])
def test_files_of_a_project_are_not_taken_for_modules(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the project')\n")
    monkeypatch.chdir(tmp_path)
    assert len(ask_apart().boards) == 2
    world.update(1, name="NVIDIA H200")
    assert leasable() == 2


def test_the_last_words_of_a_process_that_fails_are_told(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('no such luck')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    told = "the process that asks the NVIDIA driver failed: RuntimeError: no such luck; see llenergy doctor"
    assert ask_apart() == Told(missing=[told])
    with pytest.raises(DeviceError) as caught:
        leasable()
    assert str(caught.value) == told
