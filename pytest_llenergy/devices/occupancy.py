# SPDX-License-Identifier: Apache-2.0
"""Find foreign processes on leased boards and wait until they have gone.

A lease excludes only processes that request leases too. Others are detected by their processes on the board
or, where these are not visible (in a container), by the memory in use.
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

ADVICE = "end it, or choose other GPUs with --energy-gpus"


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
    """

    uuid: str
    state: Literal["free", "busy", "unknown"]
    processes: tuple[BoardProcess, ...] = ()
    memory_bytes: int | None = None
    reason: str | None = None
    ending: bool = False

    def __str__(self) -> str:
        if self.state != "busy":
            return f"{self.uuid}: {self.reason or 'free'}"
        if not self.processes:
            held = format_memory(self.memory_bytes)
            return f"{self.uuid}: busy with {held} in use by no process that is visible from here"
        return f"{self.uuid}: busy with {', '.join(map(describe_process, self.processes))}"


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
    def message(self) -> str:
        """One line for a wait that timed out: who uses the boards, and what to do."""
        return f"{self._busy}, waited {_format_seconds(self.waited_s)} s; {ADVICE}"

    @property
    def waiting_message(self) -> str:
        """One line for a wait in progress."""
        return f"waiting for {self._busy}"

    @property
    def _busy(self) -> str:
        return "; ".join(str(board) for board in self.boards if board.state == "busy")

    @property
    def flags(self) -> list[Flag]:
        """Flags for the record."""
        unknown = [board for board in self.boards if board.state == "unknown"]
        if not unknown:
            return []
        detail = f"{unknown[0].uuid}: other processes are unknown: {unknown[0].reason}"
        return [Flag(name="gpu-processes", severity="warning", detail=detail)]


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
    session = Session()
    try:
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
                on_wait(occupancy.waiting_message)
            sleep(min(pause_s, until_s - waited_s))
            pause_s = min(2 * pause_s, OCCUPANCY_POLL_LONGEST_S)
    finally:
        session.close()


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
    uuid = board.lookup_uuid
    listed = list_processes(session.module, board.device)
    others = find_foreign_processes(
        Condition(processes=listed), own_process_tree(own_pids) if listed else own_pids, proc
    )
    if others and not isinstance(others, str):
        return BoardUse(uuid, "busy", others)
    if isinstance(others, str):
        is_ours = any(uses_cuda(pid, proc) for pid in own_process_tree(own_pids))
    else:
        is_ours = bool(listed)
    used = read_used_bytes(session.module, board.device)
    if used is not None and used > IDLE_BYTES and not is_ours:
        return BoardUse(uuid, "busy", memory_bytes=used)
    if isinstance(others, str):
        return BoardUse(uuid, "unknown", reason=others, ending=bool(listed) and sees_all_pids(proc))
    return BoardUse(uuid, "free")


def find_own_boards() -> set[str]:
    """Return the UUIDs of the boards on which this process has a context; empty without CUDA."""
    if not uses_cuda(os.getpid()):
        return set()
    uuids = read_inventory().uuids
    with closing(Session()) as session:
        boards = (session.open_board(uuid) for uuid in uuids)
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
    held = (
        f" using {format_memory(process.used_memory_bytes)}" if process.used_memory_bytes is not None else ""
    )
    return f"process {process.pid} ({describe_command(process.pid) or process.name or 'name unknown'}){held}"


def describe_command(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return a program and the script or module that it runs; None if unreadable.

    Other arguments are left out, since they may contain secrets.
    """
    try:
        parts = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    words = [part for part in parts if part]
    if not words:
        return None
    shown = [Path(words[0]).name]
    if words[1:2] == ["-m"]:
        shown += words[1:3]
    elif words[1:] and not words[1].startswith("-"):
        shown.append(Path(words[1]).name)
    return " ".join(shown)


def _format_seconds(waited_s: float) -> str:
    return f"{round(waited_s, 1):g}" if waited_s < 10 else f"{waited_s:.0f}"


def uses_cuda(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has CUDA initialised; False if its open files cannot be listed."""
    with suppress(OSError):
        for entry in (proc / str(pid) / "fd").iterdir():
            # A file may be closed meanwhile: of this process, the one that lists the directory is.
            with suppress(OSError):
                if str(entry.readlink()).startswith(CUDA_FILE):
                    return True
    return False
