# SPDX-License-Identifier: Apache-2.0
"""Find foreign processes on leased boards and wait until they have gone.

A lease excludes only processes that request leases too. Others are detected by their processes on the board
or, where these are not visible (in a container), by the memory in use. A display is no such use: its boards
are free, and its processes are noted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pytest_llenergy import real_time
from pytest_llenergy.devices.condition import (
    BoardProcess,
    Condition,
    find_foreign_processes,
    list_displays,
    list_processes,
    own_process_tree,
    sees_all_pids,
)
from pytest_llenergy.devices.inventory import read_inventory
from pytest_llenergy.devices.nvml import BoardHandle, Session, read_used_bytes
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.devices.timeouts import (
    ENDED_PROCESS_LISTED_S,
    OCCUPANCY_POLL_FIRST_S,
    OCCUPANCY_POLL_LONGEST_S,
)
from pytest_llenergy.devices.visibility import is_amd
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.record import Flag

#: A board with less memory in use than this counts as free. A driver without any process shows up to 45 MiB
#: (seven MIG instances, NVIDIA MIG user guide); the context of the smallest LLM takes more than this.
IDLE_BYTES = 256 * 2**20

#: Every process that uses CUDA has this file open; a process that uses only NVML does not.
CUDA_FILE = "/dev/nvidia-uvm"


@dataclass(frozen=True)
class BoardUse:
    """Use of a board by processes outside this run.

    Attributes:
        uuid: The board or instance.
        state: Whether others use it.
        processes: The other processes, if ``busy``.
        memory_bytes: Memory that this run does not hold, if ``busy`` without visible processes.
        reason: Why the state is ``unknown``.
        ending: Whether it is ``unknown`` because the driver lists a process that has ended.
        displays: The processes that only draw on it.
    """

    uuid: str
    state: Literal["free", "busy", "unknown"]
    processes: tuple[BoardProcess, ...] = ()
    memory_bytes: int | None = None
    reason: str | None = None
    ending: bool = False
    displays: tuple[BoardProcess, ...] = ()

    @property
    def users(self) -> str:
        """Who uses the board, if ``busy``."""
        hidden = f"{format_memory(self.memory_bytes)} in use by no process that is visible from here"
        return ", ".join(map(describe_process, self.processes)) or hidden


@dataclass(frozen=True)
class Occupancy:
    """Use of all boards of a lease, after a wait of ``waited_s`` seconds."""

    boards: tuple[BoardUse, ...]
    waited_s: float = 0.0

    @property
    def state(self) -> Literal["free", "busy", "unknown"]:
        """``busy`` if one board is; else ``unknown`` if one is; else ``free``."""
        states = {board.state for board in self.boards}
        return "busy" if "busy" in states else "unknown" if "unknown" in states else "free"

    @property
    def ending(self) -> bool:
        """Whether the state will be known when the driver has dropped processes that have ended."""
        return self.state == "unknown" and any(board.ending for board in self.boards)

    @property
    def busy(self) -> str:
        """The busy boards and who uses them."""
        busy = (board for board in self.boards if board.state == "busy")
        return "; ".join(f"{board.uuid}: busy with {board.users}" for board in busy)

    @property
    def message(self) -> str:
        """One line for a wait that timed out: who uses the boards, and what to do."""
        waited = f"waited {round(self.waited_s, 1):g} s"
        return f"{self.busy}, {waited}; end it, or choose other GPUs with --energy-gpus"

    @property
    def flags(self) -> list[Flag]:
        """Flags for the record."""
        flags = []
        # The reason is the same for all boards.
        for board in [each for each in self.boards if each.state == "unknown"][:1]:
            detail = f"{board.uuid}: other processes are unknown: {board.reason}"
            flags.append(Flag(name="gpu-processes", severity="warning", detail=detail))
        for board in (each for each in self.boards if each.displays):
            names = ", ".join(map(describe_process, board.displays))
            detail = f"{board.uuid}: a display uses it, whose energy counts too: {names}"
            flags.append(Flag(name="gpu-processes", severity="note", detail=detail))
        return flags


def wait_until_free(
    uuids: Sequence[str],
    timeout_s: float,
    own_pids: Collection[int] = (),
    *,
    on_wait: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = real_time.sleep,
    clock: Callable[[], float] = real_time.monotonic,
) -> Occupancy:
    """Inspect the boards of a lease until no other process uses them.

    An unknown state ends the wait, except that a process which has ended gets up to
    ``ENDED_PROCESS_LISTED_S`` to disappear from the driver's list.

    Args:
        uuids: The boards or instances. Of a divided board only the leased instance counts.
        timeout_s: How long to wait at most (seconds).
        own_pids: Processes of this run that this process did not start; their descendants are included.
        on_wait: Called before each pause with one line that names the users of the boards.
        sleep: Replaces ``time.sleep`` in tests.
        clock: Replaces ``time.monotonic`` in tests.

    Raises:
        DeviceError: A board does not answer.
    """
    if not uuids or is_amd(uuids[0]):
        reason = "AMD SMI is not asked for them"
        return Occupancy(tuple(BoardUse(uuid, "unknown", reason=reason) for uuid in uuids))
    with closing(Session()) as session:
        boards = [session.open_board(uuid) for uuid in uuids]
        start_s, pause_s, busy_s = clock(), OCCUPANCY_POLL_FIRST_S, 0.0
        while True:
            occupancy = Occupancy(tuple(inspect_board(session, board, own_pids) for board in boards))
            waited_s = clock() - start_s
            if occupancy.state == "busy":
                busy_s, until_s = waited_s, timeout_s
            else:
                until_s = min(timeout_s, busy_s + ENDED_PROCESS_LISTED_S) if occupancy.ending else 0.0
            if waited_s >= until_s:
                return replace(occupancy, waited_s=waited_s)
            if occupancy.state == "busy":
                on_wait(f"waiting for {occupancy.busy}")
            sleep(min(pause_s, until_s - waited_s))
            pause_s = min(2 * pause_s, OCCUPANCY_POLL_LONGEST_S)


def inspect_board(
    session: Session, board: BoardHandle, own_pids: Collection[int] = (), proc: Path = Path("/proc")
) -> BoardUse:
    """Return the present use of a board or instance by other processes.

    Args:
        session: The NVML session.
        board: The board or instance.
        own_pids: Processes of this run that this process did not start.
        proc: Where the proc file system is mounted.
    """
    uuid, nvml = board.lookup_uuid, session.module
    listed, displays = list_processes(nvml, board.device), list_displays(nvml, board.device)
    others = find_foreign_processes(
        Condition(processes=listed), own_process_tree(own_pids) if listed else own_pids, proc
    )
    if others and not isinstance(others, str):
        return BoardUse(uuid, "busy", others, displays=displays)
    if isinstance(others, str):
        is_ours = any(uses_cuda(pid, proc) for pid in own_process_tree(own_pids))
    else:
        is_ours = bool(listed)
    used, drawn = read_used_bytes(nvml, board.device), [each.used_memory_bytes for each in displays]
    if used is not None and None not in drawn and not is_ours:
        used -= sum(filter(None, drawn))
        if used > IDLE_BYTES:
            return BoardUse(uuid, "busy", memory_bytes=used, displays=displays)
    if isinstance(others, str):
        ending = bool(listed) and sees_all_pids(proc)
        return BoardUse(uuid, "unknown", reason=others, ending=ending, displays=displays)
    return BoardUse(uuid, "free", displays=displays)


def find_own_boards() -> set[str]:
    """Return the UUIDs of the boards on which this process has a context; empty without CUDA."""
    if not uses_cuda(os.getpid()):
        return set()
    with closing(Session()) as session:
        boards = [session.open_board(uuid) for uuid in read_inventory().uuids]
        listed = {board.uuid: list_processes(session.module, board.device) or () for board in boards}
        return {uuid for uuid, processes in listed.items() if os.getpid() in {each.pid for each in processes}}


def read_memory_use(uuids: Sequence[str]) -> dict[str, int]:
    """Return the memory in use on boards and instances (bytes), as far as the driver reports it now."""
    used: dict[str, int | None] = {}
    with suppress(DeviceError), closing(Session()) as session:
        for uuid in uuids:
            with suppress(DeviceError):
                used[uuid] = read_used_bytes(session.module, session.open_board(uuid).device)
    return {uuid: size for uuid, size in used.items() if size is not None}


def describe_process(process: BoardProcess) -> str:
    """Return pid, command and memory of a process."""
    size = process.used_memory_bytes
    held = "" if size is None else f" using {format_memory(size)}"
    # In another namespace, the pid may be that of another process.
    command = describe_command(process.pid) if sees_all_pids() else ""
    return f"process {process.pid} ({command or process.name or 'name unknown'}){held}"


def describe_command(pid: int, proc: Path = Path("/proc")) -> str:
    """Return a program and the script that it runs, without other arguments, which may contain secrets."""
    words: list[str] = []
    with suppress(OSError):
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:2]
    return " ".join(Path(word).name for word in words if word and not word.startswith("-"))


def uses_cuda(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has CUDA initialised; False if its open files cannot be listed."""
    with suppress(OSError):
        for entry in (proc / str(pid) / "fd").iterdir():
            # A file may be closed meanwhile: of this process, the one that lists the directory is.
            with suppress(OSError):
                if str(entry.readlink()).startswith(CUDA_FILE):
                    return True
    return False
