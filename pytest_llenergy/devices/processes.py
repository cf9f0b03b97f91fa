# SPDX-License-Identifier: Apache-2.0
"""The processes on a board, and which of them this run did not start."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llenergy.devices.nvml import read_or_none
from pytest_llenergy.devices.request import format_memory

#: Inode of the first PID namespace, ``PROC_PID_INIT_INO`` (Linux: include/linux/proc_ns.h).
FIRST_PID_NAMESPACE = 0xEFFFFFFC

#: Every process that uses CUDA has this file open; a process that uses only NVML does not.
CUDA_FILE = "/dev/nvidia-uvm"


class BoardProcess(NamedTuple):
    """A process on a board; name and memory are None if unknown."""

    pid: int
    name: str | None
    used_memory_bytes: int | None

    def __str__(self) -> str:
        size = self.used_memory_bytes
        held = "" if size is None else f" using {format_memory(size)}"
        # In another namespace, the pid may be that of another process.
        command = describe_command(self.pid) if sees_all_pids() else ""
        return f"process {self.pid} ({command or self.name or 'name unknown'}){held}"


def list_processes(nvml: Any, handle: Any) -> tuple[BoardProcess, ...] | None:
    """Return all processes that compute on a board or instance, directly or through MPS.

    Those that only draw, such as a desktop, are not among them. None if the driver does not report them.
    """
    listed = read_or_none(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    if listed is None:
        return None
    # A driver that does not list MPS clients separately has them in the first list.
    clients = read_or_none(nvml, lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle))
    return _describe([*listed, *(clients or ())])


def list_displays(nvml: Any, handle: Any) -> tuple[BoardProcess, ...]:
    """Return the processes that draw on a board and do not compute, such as a display server."""
    # A board without graphics does not support it.
    drawing = read_or_none(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)) or ()
    computing = {process.pid for process in list_processes(nvml, handle) or ()}
    return _describe([process for process in drawing if process.pid not in computing])


def _describe(listed: Sequence[Any]) -> tuple[BoardProcess, ...]:
    used = {process.pid: process.usedGpuMemory for process in listed}
    return tuple(BoardProcess(pid, _read_name(pid), memory) for pid, memory in sorted(used.items()))


def _read_name(pid: int) -> str | None:
    # In another namespace, the pid may be that of another process.
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() if sees_all_pids() else None
    return None


def find_foreign_processes(
    listed: Sequence[BoardProcess] | None, own_pids: Collection[int] | None = None
) -> tuple[BoardProcess, ...] | str:
    """Return the processes on a board that this run did not start, or the reason why they are unknown.

    NVML reports process ids of the first PID namespace. Inside a container these ids are meaningless, and an
    empty list may hide processes. A process that has ended may belong to this run.

    Args:
        listed: The processes on the board.
        own_pids: Processes of this run; by default this process and its descendants.
    """
    if listed is None:
        return "the driver does not report the processes on the board"
    if not sees_all_pids():
        return "NVML reports process ids of the host, and this is another PID namespace"
    if not listed:
        return ()
    own_pids = process_tree(os.getpid()) if own_pids is None else {os.getpid(), *own_pids}
    others = [process for process in listed if process.pid not in own_pids]
    visible = tuple(process for process in others if Path(f"/proc/{process.pid}").exists())
    if visible or not others:
        return visible
    pids = ", ".join(str(process.pid) for process in others)
    return f"the board had processes that are not visible from here: {pids}"


def sees_all_pids() -> bool:
    """Return whether this process is in the first PID namespace, whose process ids NVML reports."""
    try:
        return Path("/proc/self/ns/pid").readlink().name == f"pid:[{FIRST_PID_NAMESPACE}]"
    except OSError:
        return False


def process_tree(*roots: int) -> set[int]:
    """Return ``roots`` and the ids of all their living descendants."""
    import psutil

    pids = set(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            pids.update(child.pid for child in psutil.Process(root).children(recursive=True))
    return pids


def describe_command(pid: int) -> str:
    """Return a program and the script that it runs, without other arguments, which may contain secrets."""
    words: list[str] = []
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:2]
    return " ".join(Path(word).name for word in words if word and not word.startswith("-"))


def uses_cuda(pid: int) -> bool:
    """Whether a process has CUDA initialised; False if its open files cannot be listed."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            # A file may be closed meanwhile: of this process, the one that lists the directory is.
            with suppress(OSError):
                if str(entry.readlink()).startswith(CUDA_FILE):
                    return True
    return False
