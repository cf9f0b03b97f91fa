# SPDX-License-Identifier: Apache-2.0
"""What a board goes through while it works: heat, clock, throttling, and who else is on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pytest_llenergy.devices.nvml import BoardHandle, Session

T = TypeVar("T")

#: Fields that count the nanoseconds for which a clock was held down, by the reason for it (nvml.h).
THROTTLE_FIELDS = {
    "power-cap": 74,
    "sync-boost": 76,
    "thermal-software": 269,
    "thermal-hardware": 270,
    "power-brake": 271,
}

#: The inode of the first pid namespace, ``PROC_PID_INIT_INO`` (Linux: include/linux/proc_ns.h).
FIRST_PID_NAMESPACE = 0xEFFFFFFC


class BoardProcess(NamedTuple):
    """A process on a board. ``name`` is ``None`` where it is not known here, and so is the memory."""

    pid: int
    name: str | None
    used_memory_bytes: int | None


@dataclass(frozen=True)
class Condition:
    """A board at one moment. What the driver does not tell is ``None``, or absent from ``throttled_s``.

    ``throttled_s`` counts seconds since some fixed moment, by the reason: only differences mean anything.
    """

    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[BoardProcess, ...] | None = None


class ConditionReader:
    """Reads the condition of boards, opened once. A MIG instance has its board's, and its own processes.

    Raises ``DeviceError`` where there is no driver or a board does not answer.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._session = Session()
        try:
            self._boards = {uuid: self._session.open_board(uuid) for uuid in uuids}
            self._counters = {uuid: self._answering(board) for uuid, board in self._boards.items()}
        except BaseException:
            self._session.close()
            raise

    def read(self) -> dict[str, Condition]:
        """The condition of each board, by the UUID that it was asked for."""
        return {uuid: self._condition(board, self._counters[uuid]) for uuid, board in self._boards.items()}

    def close(self) -> None:
        """Release NVML. Called once."""
        self._session.close()

    def _answering(self, board: BoardHandle) -> dict[str, int]:
        return {
            reason: code
            for reason, code in THROTTLE_FIELDS.items()
            if not isinstance(self._session.read_fields(board.handle, ((code, 0),))[0], str)
        }

    def _condition(self, board: BoardHandle, counters: Mapping[str, int]) -> Condition:
        nvml, handle = self._session.module, board.handle
        codes = [(code, 0) for code in counters.values()]
        told = self._session.read_fields(handle, codes) if codes else []
        return Condition(
            temperature_c=self._optional(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            sm_clock_mhz=self._optional(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            throttled_s={
                reason: nanoseconds / 1e9
                for reason, nanoseconds in zip(counters, told, strict=True)
                if not isinstance(nanoseconds, str)
            },
            processes=list_processes(nvml, board.device),
        )

    def _optional(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except self._session.module.NVMLError:
            return None


def list_processes(nvml: Any, handle: Any) -> tuple[BoardProcess, ...] | None:
    """Everything that computes or draws on a board or instance, directly or through MPS.

    ``None`` if it is not told.
    """
    try:
        listed = list(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
        # A board that cannot draw has no processes that do, and old drivers count none of MPS apart.
        for more in (
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ):
            with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
                listed += getattr(nvml, more)(handle)
    except nvml.NVMLError:
        return None
    used = {process.pid: process.usedGpuMemory for process in listed}
    return tuple(BoardProcess(pid, _read_process_name(pid), memory) for pid, memory in sorted(used.items()))


def _read_process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    if not sees_all_pids(proc):
        # The number belongs to another namespace; here it may be another process.
        return None
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None


def find_foreign_processes(
    condition: Condition, own_pids: Collection[int] | None = None, proc: Path = Path("/proc")
) -> tuple[BoardProcess, ...] | str:
    """The processes on a board that are not ours, or the reason why that cannot be told.

    Ours are ``own_pids``: by default this process and all that it started. NVML numbers processes as the
    first pid namespace does, so that inside a container its numbers mean nothing, and an empty list may
    hide processes; a process that ``proc`` does not show may have been one of ours that just ended.
    """
    if condition.processes is None:
        return "the driver does not tell which processes are on the board"
    if not sees_all_pids(proc):
        return "NVML numbers processes as the host does, and this is another pid namespace"
    listed = [process for process in condition.processes if process.pid != os.getpid()]
    if not listed:
        return ()
    own = own_pids if own_pids is not None else own_process_tree()
    others = [process for process in listed if process.pid not in own]
    visible = tuple(process for process in others if (proc / str(process.pid)).exists())
    if visible or not others:
        return visible
    pids = ", ".join(str(process.pid) for process in others)
    return f"processes that cannot be seen from here were on the board: {pids}"


def sees_all_pids(proc: Path = Path("/proc")) -> bool:
    """Whether the pids of NVML mean here what they mean to the driver."""
    try:
        return (proc / "self" / "ns" / "pid").readlink().name == f"pid:[{FIRST_PID_NAMESPACE}]"
    except OSError:
        return False


def own_process_tree(roots: Collection[int] = ()) -> set[int]:
    """This process, ``roots``, and all that they started and that is alive."""
    import psutil

    own = {os.getpid(), *roots}
    for root in tuple(own):
        with suppress(psutil.NoSuchProcess):
            own.update(child.pid for child in psutil.Process(root).children(recursive=True))
    return own
