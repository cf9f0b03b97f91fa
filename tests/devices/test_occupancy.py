# SPDX-License-Identifier: Apache-2.0
"""Who else is on a board, and waiting until they have left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices import occupancy
from pytest_llenergy.devices.occupancy import Occupancy, wait_until_free
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, MigInstance, Process, World
from ..nvml_sim.boards import GIB, MIB
from .lockers import until
from .test_condition import NOBODY

Attach = Callable[[World], ModuleType]
Host = Callable[..., World]


@pytest.fixture
def host(tmp_path: Path, nvml_attach: Attach) -> Host:
    """Makes the boards of this machine."""

    def make(*boards: Board) -> World:
        world = World(tmp_path / "world", boards)
        nvml_attach(world)
        return world

    return make


@pytest.fixture
def every_pid_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host: in a container the numbers of NVML mean nothing."""
    own = Path("/proc/self/ns/pid").readlink().name
    inode = int(own.removeprefix("pid:[").removesuffix("]"))
    monkeypatch.setattr("pytest_llenergy.devices.processes.FIRST_PID_NAMESPACE", inode)


@pytest.fixture
def in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is."""
    monkeypatch.setattr("pytest_llenergy.devices.processes.FIRST_PID_NAMESPACE", 0)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[int]:
    """The pid of a process that is not ours: the one that started it has ended."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.stdin.read()")
    read, write = os.pipe()
    train = [sys.executable, str(script), "--key=1"]
    # It must not hold on to the output that is read here.
    start = f"import subprocess; print(subprocess.Popen({train!r}, stdout=2).pid)"
    made = subprocess.run([sys.executable, "-c", start], stdin=read, stdout=subprocess.PIPE, check=True)
    os.close(read)
    pid = int(made.stdout)
    # It has no command until the kernel has made the memory of its program.
    until(lambda: bool(Path(f"/proc/{pid}/cmdline").read_bytes()))
    yield pid
    os.close(write)


def uuids(world: World) -> list[str]:
    return [world.board(index).uuid for index in range(len(world._records))]


class Pauses:
    """A clock that passes only in its pauses; ``then`` is done once it has paused so often."""

    def __init__(self, times: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.pauses: list[float] = []
        self._times, self._then = times, then

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self._times:
            self._then()

    def monotonic(self) -> float:
        return sum(self.pauses)


def wait(world: World, timeout_s: float = 60.0, pauses: Pauses | None = None) -> Occupancy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(occupancy, "real_time", pauses or Pauses())
        return occupancy.wait_until_free(uuids(world), timeout_s)


@pytest.mark.usefixtures("every_pid_counts")
class TestOnAHost:
    def test_idle_boards_are_free_at_once(self, host: Host) -> None:
        pauses = Pauses()
        seen = wait(host(Board(memory_reserved=700 * MIB), Board(memory_used=200 * MIB)), pauses=pauses)
        assert (seen.state, seen.waited_s, seen.flags, pauses.pauses) == ("free", 0.0, [], [])

    def test_a_foreign_process_is_waited_for_and_named(self, host: Host, stranger: int) -> None:
        holder = Process(stranger, used_memory=12 * GIB + 350 * MIB)
        world = host(Board(), Board(memory_used=13 * GIB, processes=(holder,)))
        pauses = Pauses()
        seen = wait(world, 5.0, pauses)
        assert seen.state == "busy"
        assert pauses.pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 0.45])
        name = Path(sys.executable).name
        assert seen.message == (
            f"{uuids(world)[1]}: busy with process {stranger} ({name} train.py) using 12.3 GiB, waited 5 s; "
            "end it, or choose other GPUs with --energy-gpus"
        )

    def test_an_ended_process_is_waited_for_until_the_driver_forgets_it(self, host: Host) -> None:
        world = host(Board(processes=(Process(NOBODY),)))
        forget = Pauses(2, lambda: world.update(0, processes=()))
        assert wait(world, pauses=forget).state == "free"
        assert len(forget.pauses) == 2

    def test_an_ended_process_that_stays_listed_is_unknown_after_two_seconds(self, host: Host) -> None:
        world = host(Board(processes=(Process(NOBODY),)))
        seen = wait(world)
        assert seen.state == "unknown"
        assert seen.waited_s == pytest.approx(2.0)
        assert wait(world, 0.5).waited_s == pytest.approx(0.5)

    def test_mps_clients_count_too(self, host: Host, stranger: int) -> None:
        seen = wait(host(Board(processes=(Process(stranger, used_memory=None, mps=True),))), 0.1)
        assert (seen.state, seen.boards[0].processes[0].pid) == ("busy", stranger)

    def test_a_display_is_noted_and_the_board_is_free(self, host: Host, stranger: int) -> None:
        """Whatever its memory, which may be unknown; not if it computes, or memory is used beside it."""
        display = Process(stranger, used_memory=2 * GIB, graphics=True)
        world = host(Board(memory_used=2 * GIB, processes=(display,)))
        seen = wait(world)
        assert (seen.state, seen.waited_s) == ("free", 0.0)
        (flag,) = seen.flags
        assert (flag.name, flag.severity) == ("gpu-processes", "note")
        assert flag.detail.startswith(f"{uuids(world)[0]}: a display uses it, whose energy counts too: ")
        assert f"process {stranger} (" in flag.detail
        world.update(0, processes=(replace(display, used_memory=None),))
        assert wait(world).state == "free"
        world.update(0, processes=(display,), memory_used=9 * GIB)
        assert "busy with 7 GiB in use by no process" in wait(world, 0.1).message
        world.update(0, processes=(display, Process(stranger)))
        assert wait(world, 0.1).boards[0].processes[0].pid == stranger

    def test_ranks_of_this_run_are_not_foreign(self, host: Host) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        world = host(Board(memory_used=40 * GIB, processes=(Process(child.pid), Process(os.getpid()))))
        assert wait(world).state == "free"
        child.communicate(b"\n", timeout=60)

    def test_memory_held_by_no_visible_process_is_waited_for(self, host: Host) -> None:
        """The driver is still freeing what a process had that was killed."""
        world = host(Board(memory_used=12 * GIB, memory_reserved=700 * MIB))
        freed = Pauses(2, lambda: world.update(0, memory_used=0))
        assert wait(world, pauses=freed).state == "free"
        world.update(0, memory_used=12 * GIB)
        assert wait(world, 1.0).message == (
            f"{uuids(world)[0]}: busy with 12 GiB in use by no process that is visible from here, "
            "waited 1 s; end it, or choose other GPUs with --energy-gpus"
        )

    def test_only_the_leased_instance_of_a_divided_board_counts(self, host: Host, stranger: int) -> None:
        parts = (MigInstance("MIG-a", gpu_instance=1), MigInstance("MIG-b", gpu_instance=2))
        other = Process(stranger, gpu_instance=2)
        host(Board(mig_enabled=True, mig_instances=parts, processes=(other,)))
        assert wait_until_free(["MIG-a"], 0.01).state == "free"
        seen = wait_until_free(["MIG-a", "MIG-b"], 0.01)
        assert [(board.uuid, board.state) for board in seen.boards] == [("MIG-a", "free"), ("MIG-b", "busy")]

    def test_unreported_processes_are_unknown_and_not_waited_for(self, host: Host) -> None:
        world = host(Board(processes_supported=False))
        pauses = Pauses()
        seen = wait(world, pauses=pauses)
        assert (seen.state, pauses.pauses) == ("unknown", [])
        (flag,) = seen.flags
        assert (flag.name, flag.severity) == ("gpu-processes", "warning")
        assert flag.detail == (
            f"{uuids(world)[0]}: other processes are unknown: the driver does not report the processes "
            "on the board"
        )

    def test_a_lost_board_is_an_error(self, host: Host) -> None:
        world = host(Board())
        world.update(0, lost=True)
        with pytest.raises(DeviceError, match=r"does not answer \(GPU is lost\)"):
            wait(world)


@pytest.mark.usefixtures("in_a_container")
class TestInAContainer:
    def test_memory_in_use_makes_a_board_busy(self, host: Host) -> None:
        seen = wait(host(Board(memory_used=12 * GIB, processes=(Process(1),))), 0.1)
        assert seen.state == "busy"
        assert "12 GiB in use by no process that is visible from here" in seen.message

    def test_without_memory_in_use_occupancy_is_unknown(self, host: Host) -> None:
        seen = wait(host(Board(), Board(processes=(Process(1),))))
        assert (seen.state, len(seen.flags)) == ("unknown", 1)
        assert "another PID namespace" in seen.flags[0].detail

    def test_memory_that_this_run_may_hold_does_not_make_a_board_busy(
        self, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = host(Board(memory_used=12 * GIB))
        monkeypatch.setattr("pytest_llenergy.devices.processes.CUDA_FILE", str(tmp_path / "uvm"))
        assert wait(world, 0.1).state == "busy"
        with (tmp_path / "uvm").open("w"):
            assert wait(world, 0.1).state == "unknown"
