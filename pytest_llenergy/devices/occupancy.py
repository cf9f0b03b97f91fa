# SPDX-License-Identifier: Apache-2.0
"""Find foreign processes on leased boards and wait until they have gone.

A lease keeps out those who ask for one. Everybody else shows by their processes, or by the memory that they
hold where processes cannot be told, as in a container.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pytest_llenergy.devices.allocation import IDLE_BYTES
from pytest_llenergy.devices.condition import (
    BoardProcess,
    Condition,
    find_foreign_processes,
    list_processes,
    own_process_tree,
    sees_all_pids,
)
from pytest_llenergy.devices.inventory import read_used_bytes
from pytest_llenergy.devices.nvml import BoardHandle, Session
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.devices.timeouts import (
    ENDED_PROCESS_LISTED_S,
    OCCUPANCY_POLL_FIRST_S,
    OCCUPANCY_POLL_LONGEST_S,
)
from pytest_llenergy.model.record import Flag

#: What CUDA opens in every process that uses it, and NVML does not.
CUDA_FILE = "/dev/nvidia-uvm"

ADVICE = "end it, choose other GPUs with --energy-gpus, or raise --energy-busy-timeout"


@dataclass(frozen=True)
class BoardUse:
    """Who else is on a board.

    ``busy``: by ``processes``, or by ``memory_bytes`` that none of ours holds. ``unknown``: for this reason;
    ``ending`` if that is a process that the driver lists and the system has no more.
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
            return f"{self.uuid}: busy with {held} in use by no process that can be seen from here"
        return f"{self.uuid}: busy with {', '.join(map(describe_process, self.processes))}"


@dataclass(frozen=True)
class Occupancy:
    """All boards of a lease after ``waited_s`` seconds."""

    boards: tuple[BoardUse, ...]
    waited_s: float = 0.0

    @property
    def state(self) -> Literal["free", "busy", "unknown"]:
        """``busy`` if one board is; else ``unknown`` if one cannot be told; else ``free``."""
        states = {board.state for board in self.boards}
        return "busy" if "busy" in states else "unknown" if "unknown" in states else "free"

    @property
    def ending(self) -> bool:
        """Whether it may be told in a moment, when the driver has forgotten those who ended."""
        return self.state == "unknown" and any(board.ending for board in self.boards)

    @property
    def message(self) -> str:
        """One line on who is in the way, and what to do."""
        return f"{self._busy}, waited {_format_seconds(self.waited_s)} s; {ADVICE}"

    @property
    def awaited(self) -> str:
        """Who is in the way, for those who look on."""
        return f"waiting for {self._busy}"

    @property
    def _busy(self) -> str:
        return "; ".join(str(board) for board in self.boards if board.state == "busy")

    @property
    def flags(self) -> list[Flag]:
        """What the record must say: that other processes could not be told."""
        unknown = [board for board in self.boards if board.state == "unknown"]
        if not unknown:
            return []
        detail = f"{unknown[0].uuid}: other processes cannot be told: {unknown[0].reason}"
        return [Flag(name="foreign-unknown", severity="warning", detail=detail)]


def wait_until_free(
    uuids: Sequence[str],
    timeout_s: float,
    own: Collection[int] = (),
    *,
    tell: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Occupancy:
    """Look at the boards of a lease until nobody else is on them, or for ``timeout_s`` seconds.

    Of a board that MIG divides, only the instance that is leased counts. ``own`` are pids that are ours
    although this process did not start them; what they started is ours too. What cannot be told is not waited
    for, but that a process which has ended leaves the driver's list, for up to
    ``ENDED_PROCESS_LISTED_S``. ``tell`` is
    given, before each pause, who is waited for.
    Raises ``DeviceError`` when a board does not answer.
    """
    if not uuids:
        return Occupancy(())
    session = Session()
    try:
        boards = [session.open_board(uuid) for uuid in uuids]
        start_s, pause_s, busy_s = clock(), OCCUPANCY_POLL_FIRST_S, 0.0
        while True:
            seen = Occupancy(tuple(inspect_board(session, board, own) for board in boards))
            waited_s = clock() - start_s
            if seen.state == "busy":
                busy_s, until_s = waited_s, timeout_s
            else:
                until_s = min(timeout_s, busy_s + ENDED_PROCESS_LISTED_S) if seen.ending else 0.0
            if waited_s >= until_s:
                return replace(seen, waited_s=waited_s)
            if seen.state == "busy":
                tell(seen.awaited)
            sleep(min(pause_s, until_s - waited_s))
            pause_s = min(2 * pause_s, OCCUPANCY_POLL_LONGEST_S)
    finally:
        session.close()


def inspect_board(
    session: Session, board: BoardHandle, own: Collection[int] = (), proc: Path = Path("/proc")
) -> BoardUse:
    """Who else is on one board, or on one of its instances, now."""
    listed = list_processes(session.module, board.device)
    others = find_foreign_processes(
        Condition(processes=listed), own_process_tree(own) if listed else own, proc
    )
    if others and not isinstance(others, str):
        return BoardUse(board.lookup_uuid, "busy", others)
    used = read_used_bytes(session.module, board.lookup_uuid)
    ours = (
        bool(listed)
        if not isinstance(others, str)
        else any(_uses_cuda(pid, proc) for pid in own_process_tree(own))
    )
    if used is not None and used > IDLE_BYTES and not ours:
        return BoardUse(board.lookup_uuid, "busy", memory_bytes=used)
    if isinstance(others, str):
        return BoardUse(
            board.lookup_uuid, "unknown", reason=others, ending=bool(listed) and sees_all_pids(proc)
        )
    return BoardUse(board.lookup_uuid, "free")


def describe_process(process: BoardProcess) -> str:
    """Its pid, command and memory."""
    held = (
        f" using {format_memory(process.used_memory_bytes)}" if process.used_memory_bytes is not None else ""
    )
    return f"process {process.pid} ({describe_command(process.pid) or process.name or 'name unknown'}){held}"


def describe_command(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The program and the script or module that it runs; ``None`` where it cannot be read.

    Nothing more: arguments may hold what does not belong into a report.
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


def _uses_cuda(pid: int, proc: Path) -> bool:
    try:
        files = [entry.readlink() for entry in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return False
    return any(str(file).startswith(CUDA_FILE) for file in files)
