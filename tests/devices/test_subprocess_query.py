# SPDX-License-Identifier: Apache-2.0
"""Query the driver in a subprocess, whatever directory it starts in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_llenergy.devices.subprocess_query import DriverReport, query_boards, query_gpu_count
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give
from ..nvml_sim.world import NO_PERMISSION

DRIVER_NOT_LOADED = 9


@pytest.fixture
def world(tmp_path: Path, nvml_children: Give) -> World:
    return nvml_children(World(tmp_path / "world", [Board(name="NVIDIA H200", power_limit_w=650), Board()]))


def test_boards_and_driver_version_are_those_of_the_driver(world: World) -> None:
    report = query_boards()
    assert [board.uuid for board in report.boards] == [world.board(index).uuid for index in range(2)]
    assert (report.boards[0].name, report.boards[0].power_limit_w) == ("NVIDIA H200", 650)
    assert (report.driver, report.missing) == ("580.95.05", [])


def test_a_host_without_a_driver_has_no_boards_and_no_errors(world: World) -> None:
    world.set_init_result(DRIVER_NOT_LOADED)
    assert query_boards() == DriverReport()


def test_an_error_of_the_driver_is_reported_in_its_words(world: World) -> None:
    world.set_init_result(NO_PERMISSION)
    refused = "NVML: Insufficient Permissions; see nvidia-smi"
    assert query_boards() == DriverReport(missing=[refused])
    with pytest.raises(DeviceError) as caught:
        query_gpu_count()
    assert str(caught.value) == (
        f"the process that queries the NVIDIA driver failed: {refused}; see llenergy doctor"
    )


def test_a_lost_board_does_not_hide_the_others(world: World) -> None:
    world.update(0, lost=True)
    report = query_boards()
    assert [board.uuid for board in report.boards] == [world.board(1).uuid]
    assert report.missing == ["NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi"]


def test_files_in_the_current_directory_are_not_imported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "token", "platform", "runpy", "msgspec", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the project')\n")
    monkeypatch.chdir(tmp_path)
    assert len(query_boards().boards) == 2
    world.update(1, name="NVIDIA H200")
    assert query_gpu_count() == 2


def test_the_last_line_of_a_failing_subprocess_is_reported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('no such luck')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    message = (
        "the process that queries the NVIDIA driver failed: RuntimeError: no such luck; see llenergy doctor"
    )
    assert query_boards() == DriverReport(missing=[message])
    with pytest.raises(DeviceError) as caught:
        query_gpu_count()
    assert str(caught.value) == message
