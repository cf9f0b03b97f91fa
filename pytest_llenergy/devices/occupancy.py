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
from typing import Literal

from pytest_llenergy import real_time
from pytest_llenergy.devices.amd_smi import is_amd
from pytest_llenergy.devices.inventory import read_inventory
from pytest_llenergy.devices.nvml import BoardHandle, Session, read_used_bytes
from pytest_llenergy.devices.processes import (
    BoardProcess,
    find_foreign_processes,
    list_displays,
    list_processes,
    process_tree,
    sees_all_pids,
    uses_cuda,
)
from pytest_llenergy.devices.request import format_memory
from pytest_llenergy.devices.timeouts import (
    ENDED_PROCESS_LISTED_S,
    OCCUPANCY_POLL_FIRST_S,
    OCCUPANCY_POLL_LONGEST_S,
)
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.record import Flag

#: A board with less memory in use than this counts as free. A driver without any process shows up to 45 MiB
#: (seven MIG instances, NVIDIA MIG user guide); the context of the smallest LLM takes more than this.
IDLE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class BoardUse:
    """Use of a board or instance by processes outside this run.

    Attributes:
        processes: The other processes that compute there.
        memory_bytes: Memory that no visible process holds, if that is too much for an idle board.
        unknown: Why other processes are unknown.
        ending: Whether they are unknown because the driver lists a process that has ended.
        displays: The processes that only draw on it.
    """

    uuid: str
    processes: tuple[BoardProcess, ...] = ()
    memory_bytes: int | None = None
    unknown: str | None = None
    ending: bool = False
    displays: tuple[BoardProcess, ...] = ()

    @property
    def state(self) -> Literal["free", "busy", "unknown"]:
        """Whether others use the board."""
        if self.processes or self.memory_bytes is not None:
            return "busy"
        return "free" if self.unknown is None else "unknown"

    @property
    def users(self) -> str:
        """Who uses the board, if ``busy``."""
        hidden = f"{format_memory(self.memory_bytes)} in use by no process that is visible from here"
        return ", ".join(map(str, self.processes)) or hidden


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
            detail = f"{board.uuid}: other processes are unknown: {board.unknown}"
            flags.append(Flag(name="gpu-processes", severity="warning", detail=detail))
        for board in (each for each in self.boards if each.displays):
            names = ", ".join(map(str, board.displays))
            detail = f"{board.uuid}: a display uses it, whose energy counts too: {names}"
            flags.append(Flag(name="gpu-processes", severity="note", detail=detail))
        return flags


def wait_until_free(
    uuids: Sequence[str],
    timeout_s: float,
    own_pids: Collection[int] = (),
    on_wait: Callable[[str], None] = lambda _: None,
) -> Occupancy:
    """Inspect the boards of a lease until no other process uses them.

    An unknown state ends the wait, except that a process which has ended gets up to
    ``ENDED_PROCESS_LISTED_S`` to disappear from the driver's list.

    Args:
        uuids: The boards or instances. Of a divided board only the leased instance counts.
        timeout_s: How long to wait at most (seconds).
        own_pids: Processes of this run that this process did not start; their descendants are included.
        on_wait: Called before each pause with one line that names the users of the boards.

    Raises:
        DeviceError: A board does not answer.
    """
    if not uuids or is_amd(uuids[0]):
        unknown = "AMD SMI is not asked for them"
        return Occupancy(tuple(BoardUse(uuid, unknown=unknown) for uuid in uuids))
    with closing(Session()) as session:
        boards = [session.open_board(uuid) for uuid in uuids]
        start_s, pause_s, busy_s = real_time.monotonic(), OCCUPANCY_POLL_FIRST_S, 0.0
        while True:
            occupancy = Occupancy(tuple(inspect_board(session, board, own_pids) for board in boards))
            waited_s, until_s = real_time.monotonic() - start_s, 0.0
            if occupancy.state == "busy":
                busy_s, until_s = waited_s, timeout_s
            elif occupancy.ending:
                until_s = min(timeout_s, busy_s + ENDED_PROCESS_LISTED_S)
            if waited_s >= until_s:
                return replace(occupancy, waited_s=waited_s)
            if occupancy.state == "busy":
                on_wait(f"waiting for {occupancy.busy}")
            real_time.sleep(min(pause_s, until_s - waited_s))
            pause_s = min(2 * pause_s, OCCUPANCY_POLL_LONGEST_S)


def inspect_board(session: Session, board: BoardHandle, own_pids: Collection[int] = ()) -> BoardUse:
    """Return the present use of a board or instance by other processes than ``own_pids`` and ours."""
    nvml, device = session.module, board.device
    listed = list_processes(nvml, device)
    ours = process_tree(os.getpid(), *own_pids)
    others = find_foreign_processes(listed, ours)
    use = BoardUse(board.lookup_uuid, displays=list_displays(nvml, device))
    if isinstance(others, str):
        use = replace(use, unknown=others, ending=bool(listed) and sees_all_pids())
        is_ours = any(map(uses_cuda, ours))
    else:
        use = replace(use, processes=others)
        is_ours = bool(listed)
    used, drawn = read_used_bytes(nvml, device), [each.used_memory_bytes for each in use.displays]
    if used is not None and None not in drawn and not is_ours:
        used -= sum(filter(None, drawn))
        use = replace(use, memory_bytes=used if used > IDLE_BYTES else None)
    return use


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
