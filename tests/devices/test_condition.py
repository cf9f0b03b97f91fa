# SPDX-License-Identifier: Apache-2.0
"""What a board goes through, and who else is on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.condition import BoardProcess, Condition, ConditionReader, find_foreign_processes
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


@pytest.fixture
def child() -> Iterator[int]:
    """The pid of a process that this one started."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n", timeout=60)


def proc_of(root: Path, namespace: int, *pids: int) -> Path:
    """A /proc of a pid namespace with these processes."""
    (root / "self" / "ns").mkdir(parents=True)
    (root / "self" / "ns" / "pid").symlink_to(f"pid:[{namespace}]")
    for pid in pids:
        (root / str(pid)).mkdir()
    return root


def test_each_board_has_its_own_condition(conditions: Callable[..., list[Condition]]) -> None:
    cool, hot = conditions(
        Board(temperature_c=33, clocks_mhz=(210, 345, 405, 300)),
        Board(temperature_c=84, throttle_ns={74: 2_500_000_000, 270: 1_000_000}),
    )
    assert (cool.temperature_c, cool.sm_clock_mhz) == (33.0, 345)
    assert (hot.temperature_c, hot.sm_clock_mhz) == (84.0, 1980)
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
    monkeypatch.setattr("pytest_llenergy.devices.condition.FIRST_PID_NAMESPACE", inode)
    assert watch.find_others({7}) == [world.board(2).uuid]
    monkeypatch.setattr("pytest_llenergy.devices.condition.FIRST_PID_NAMESPACE", 0)
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
    assert lost == Condition(temperature_c=None, sm_clock_mhz=None, throttled_s={}, processes=None)
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


def processes(*pids: int) -> Condition:
    return Condition(processes=tuple(BoardProcess(pid, None, None) for pid in pids))


FIRST_NAMESPACE = 4026531836
CONTAINER = 4026532201


def test_this_process_and_its_children_are_not_foreign(tmp_path: Path, child: int) -> None:
    me, parent = os.getpid(), os.getppid()
    proc = proc_of(tmp_path, FIRST_NAMESPACE, me, parent, child)
    assert find_foreign_processes(processes(me, child), proc=proc) == ()
    assert find_foreign_processes(processes(me, child, parent), proc=proc) == (
        BoardProcess(parent, None, None),
    )
    assert find_foreign_processes(processes(child, parent), own_pids={parent}, proc=proc) == (
        BoardProcess(child, None, None),
    )


def test_an_invisible_process_is_not_called_foreign(tmp_path: Path) -> None:
    """It may be a child of ours that just ended, or be hidden by the mount options of /proc."""
    proc = proc_of(tmp_path, FIRST_NAMESPACE, 7)
    told = f"the board had processes that are not visible from here: {NOBODY}"
    assert find_foreign_processes(processes(NOBODY), proc=proc) == told
    assert find_foreign_processes(processes(7, NOBODY), own_pids=(), proc=proc) == (
        BoardProcess(7, None, None),
    )


@pytest.mark.parametrize("pids", [(), (1,), (os.getpid(),), (NOBODY,)])
def test_in_a_container_foreign_processes_are_unknown(tmp_path: Path, pids: tuple[int, ...]) -> None:
    """The numbers are the host's, and processes of other containers may be left out."""
    proc = proc_of(tmp_path, CONTAINER, 1, os.getpid())
    told = "NVML reports process ids of the host, and this is another PID namespace"
    assert find_foreign_processes(processes(*pids), proc=proc) == told
