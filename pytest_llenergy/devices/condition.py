# SPDX-License-Identifier: Apache-2.0
"""The condition of a board at work: temperature, clock, throttling, and its processes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llenergy.devices.nvml import BoardHandle, Session
from pytest_llenergy.devices.probe import read_or_none, read_text

#: Fields that count the nanoseconds for which a clock was reduced, by reason (nvml.h).
THROTTLE_FIELDS = {
    "power-cap": 74,
    "sync-boost": 76,
    "thermal-software": 269,
    "thermal-hardware": 270,
    "power-brake": 271,
}

#: Inode of the first PID namespace, ``PROC_PID_INIT_INO`` (Linux: include/linux/proc_ns.h).
FIRST_PID_NAMESPACE = 0xEFFFFFFC


class BoardProcess(NamedTuple):
    """A process on a board; name and memory are None if unknown."""

    pid: int
    name: str | None
    used_memory_bytes: int | None


@dataclass(frozen=True)
class Condition:
    """The condition of a board at one moment.

    Values that the driver does not report are None, or missing from ``throttled_s``, which counts seconds of
    throttling by reason since an arbitrary moment, so that only differences are meaningful.
    """

    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[BoardProcess, ...] | None = None


class ConditionReader:
    """Reads the condition of boards, which stay open.

    The condition of a MIG instance is that of its board, except for the processes, which are its own.

    Raises:
        DeviceError: There is no driver, or a board does not answer.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._session = Session()
        try:
            self._boards = {uuid: self._session.open_board(uuid) for uuid in uuids}
            self._counters = {uuid: self._supported_counters(board) for uuid, board in self._boards.items()}
        except BaseException:
            self._session.close()
            raise

    def read(self) -> dict[str, Condition]:
        """Return the condition of each board by the UUID that was passed for it."""
        return {uuid: self._condition(board, self._counters[uuid]) for uuid, board in self._boards.items()}

    def find_others(self, pids: Collection[int]) -> list[str]:
        """Return the UUIDs of the other boards of the host that these processes use, as far as is known."""
        nvml, found = self._session.module, []
        leased = {board.uuid for board in self._boards.values()}
        count = read_or_none(nvml, nvml.nvmlDeviceGetCount) or 0
        for index in range(count) if sees_all_pids() else ():
            # A board that is lost does not answer.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = read_text(nvml.nvmlDeviceGetUUID, handle)
                listed = list_processes(nvml, handle) or () if uuid not in leased else ()
                if any(process.pid in pids for process in listed):
                    found.append(uuid)
        return found

    def close(self) -> None:
        """Close the session; call once."""
        self._session.close()

    def _supported_counters(self, board: BoardHandle) -> dict[str, int]:
        return {
            reason: code
            for reason, code in THROTTLE_FIELDS.items()
            if not isinstance(self._session.read_fields(board.handle, ((code, 0),))[0], str)
        }

    def _condition(self, board: BoardHandle, counters: Mapping[str, int]) -> Condition:
        nvml, handle = self._session.module, board.handle
        codes = [(code, 0) for code in counters.values()]
        values = self._session.read_fields(handle, codes) if codes else []
        return Condition(
            temperature_c=read_or_none(
                nvml, lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            sm_clock_mhz=read_or_none(
                nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            ),
            throttled_s={
                reason: nanoseconds / 1e9
                for reason, nanoseconds in zip(counters, values, strict=True)
                if not isinstance(nanoseconds, str)
            },
            processes=list_processes(nvml, board.device),
        )


def list_processes(nvml: Any, handle: Any) -> tuple[BoardProcess, ...] | None:
    """Return all processes that compute on a board or instance, directly or through MPS.

    Those that only draw, such as a desktop, are not among them. None if the driver does not report them.
    """
    try:
        listed = list(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
        # A driver that does not list MPS clients separately has them in the first list.
        with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            listed += nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)
    except nvml.NVMLError:
        return None
    return _describe(listed)


def list_displays(nvml: Any, handle: Any) -> tuple[BoardProcess, ...]:
    """Return the processes that draw on a board and do not compute, such as a display server."""
    # A board without graphics does not support it.
    drawing = read_or_none(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)) or ()
    computing = {process.pid for process in list_processes(nvml, handle) or ()}
    return _describe([process for process in drawing if process.pid not in computing])


def _describe(listed: Sequence[Any]) -> tuple[BoardProcess, ...]:
    used = {process.pid: process.usedGpuMemory for process in listed}
    return tuple(BoardProcess(pid, _read_process_name(pid), memory) for pid, memory in sorted(used.items()))


def _read_process_name(pid: int) -> str | None:
    # In another namespace, the pid may be that of another process.
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() if sees_all_pids() else None
    return None


def find_foreign_processes(
    condition: Condition, own_pids: Collection[int] | None = None, proc: Path = Path("/proc")
) -> tuple[BoardProcess, ...] | str:
    """Return the processes on a board that this run did not start, or the reason why they are unknown.

    NVML reports process ids of the first PID namespace. Inside a container these ids are meaningless, and an
    empty list may hide processes. A process that ``proc`` does not show may belong to this run and have just
    ended.

    Args:
        condition: The board.
        own_pids: Processes of this run; by default this process and its descendants.
        proc: Where the proc file system is mounted.
    """
    if condition.processes is None:
        return "the driver does not report the processes on the board"
    if not sees_all_pids(proc):
        return "NVML reports process ids of the host, and this is another PID namespace"
    if not condition.processes:
        return ()
    own_pids = {os.getpid(), *(own_process_tree() if own_pids is None else own_pids)}
    others = [process for process in condition.processes if process.pid not in own_pids]
    visible = tuple(process for process in others if (proc / str(process.pid)).exists())
    if visible or not others:
        return visible
    pids = ", ".join(str(process.pid) for process in others)
    return f"the board had processes that are not visible from here: {pids}"


def sees_all_pids(proc: Path = Path("/proc")) -> bool:
    """Return whether this process is in the first PID namespace, whose process ids NVML reports."""
    try:
        return (proc / "self" / "ns" / "pid").readlink().name == f"pid:[{FIRST_PID_NAMESPACE}]"
    except OSError:
        return False


def own_process_tree(roots: Collection[int] = ()) -> set[int]:
    """Return the ids of this process, of ``roots``, and of all their living descendants."""
    return process_tree({os.getpid(), *roots})


def process_tree(roots: Collection[int]) -> set[int]:
    """Return ``roots`` and the ids of all their living descendants."""
    import psutil

    pids = set(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            pids.update(child.pid for child in psutil.Process(root).children(recursive=True))
    return pids
