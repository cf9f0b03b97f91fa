# SPDX-License-Identifier: Apache-2.0
"""What a board goes through, and who else is on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.condition import Condition, ConditionReader
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, MigInstance, Process, World
from ..nvml_sim.boards import GIB

Attach = Callable[[World], ModuleType]

#: No process has this number: it is above the largest pid_max that Linux allows (2^22).
NOBODY = 1 << 23


@pytest.fixture
def conditions(tmp_path: Path, nvml_attach: Attach) -> Callable[..., list[Condition]]:
    """The conditions of boards, in their order."""

    def read(*boards: Board) -> list[Condition]:
        world = World(tmp_path / "world", boards)
        nvml_attach(world)
        uuids = [world.board(index).uuid for index in range(len(boards))]
        watch = ConditionReader(uuids)
        found = watch.read()
        watch.close()
        return [found[uuid] for uuid in uuids]

    return read


def test_each_board_has_its_own_condition(conditions: Callable[..., list[Condition]]) -> None:
    cool, hot = conditions(
        Board(temperature_c=33),
        Board(temperature_c=84, throttle_ns={74: 2_500_000_000, 270: 1_000_000}),
    )
    assert cool.temperature_c == 33.0
    assert hot.temperature_c == 84.0
    assert set(cool.throttled_s.values()) == {0.0}
    assert hot.throttled_s == {
        "power-cap": 2.5,
        "sync-boost": 0.0,
        "thermal-software": 0.0,
        "thermal-hardware": 0.001,
        "power-brake": 0.0,
    }
    assert (cool.processes, hot.processes) == ((), ())


def test_other_boards_of_processes_are_found(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole boards and instances; not the leased ones, lost ones, those of others, or any in a container."""
    used, other = (Process(7), Process(8)), (Process(8),)
    divided = Board(
        mig_enabled=True, mig_instances=(MigInstance("MIG-a"), MigInstance("MIG-b")), processes=used
    )
    boards = [Board(processes=used), divided, Board(processes=used), Board(processes=other), Board(lost=True)]
    world = World(tmp_path / "world", boards)
    nvml_attach(world)
    watch = ConditionReader([world.board(0).uuid, "MIG-a"])
    inode = int(Path("/proc/self/ns/pid").readlink().name.removeprefix("pid:[")[:-1])
    monkeypatch.setattr("pytest_llenergy.devices.processes.FIRST_PID_NAMESPACE", inode)
    assert watch.find_others({7}) == [world.board(2).uuid]
    monkeypatch.setattr("pytest_llenergy.devices.processes.FIRST_PID_NAMESPACE", 0)
    assert watch.find_others({7}) == []
    watch.close()


def test_a_lost_board_has_no_condition(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(temperature_c=70), Board(temperature_c=50)])
    nvml_attach(world)
    uuids = [world.board(index).uuid for index in range(2)]
    watch = ConditionReader(uuids)
    world.update(0, lost=True)
    lost, alive = (watch.read()[uuid] for uuid in uuids)
    watch.close()
    assert lost == Condition(temperature_c=None, throttled_s={}, processes=None)
    assert alive.temperature_c == 50.0
    with pytest.raises(DeviceError, match=rf"^NVML: {uuids[0]} does not answer \(GPU is lost\)"):
        ConditionReader(uuids)


def test_processes_have_a_pid_a_name_and_memory(conditions: Callable[..., list[Condition]]) -> None:
    me = os.getpid()
    unknown = Process(NOBODY, used_memory=None)
    drawing = Process(NOBODY + 1, used_memory=3 * GIB, graphics=True)
    (condition,) = conditions(Board(processes=(unknown, Process(me, used_memory=3 * GIB), drawing)))
    own = Path("/proc/self/comm").read_text().strip()
    found = condition.processes or ()
    assert [(process.pid, process.used_memory_bytes) for process in found] == [(me, 3 * GIB), (NOBODY, None)]
    assert found[0].name in {own, None}
    assert found[1].name is None
