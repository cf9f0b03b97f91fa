# SPDX-License-Identifier: Apache-2.0
"""Boards and driver as a process of its own tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.devices.inquiry import boards_and_driver
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION

DRIVER_NOT_LOADED = 9


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200", power_limit_w=650), Board()]))


def test_it_tells_what_the_driver_shows(world: World) -> None:
    boards, driver = boards_and_driver()
    assert [board.uuid for board in boards] == [world.board(index).uuid for index in range(2)]
    assert (boards[0].name, boards[0].power_limit_w, driver) == ("NVIDIA H200", 650, "580.95.05")


def test_without_a_driver_there_is_nothing(world: World) -> None:
    world.set_init_result(DRIVER_NOT_LOADED)
    assert boards_and_driver() == ([], None)


def test_what_is_wrong_is_told_in_the_drivers_words(world: World) -> None:
    world.set_init_result(NO_PERMISSION)
    with pytest.raises(DeviceError, match=r"^NVML: Insufficient Permissions; see nvidia-smi$"):
        boards_and_driver()
