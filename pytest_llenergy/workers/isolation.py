# SPDX-License-Identifier: Apache-2.0
"""Detect state that a test leaves in its rank."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_llenergy.workers import proctree

#: Threads that a library starts once and keeps, by the module whose function they run. All wait.
KEPT_THREADS = (
    # Looks every ten seconds whether a bar has stood still; loading a model starts it.
    "tqdm._monitor",
    # Read what torch.compile's own processes answer, and put these to sleep.
    "torch._inductor.compile_worker",
    # Hands out descriptors, from the first that was put into a queue on, such as those of torch's tensors.
    "multiprocessing.resource_sharer",
)

#: Processes that a library starts once and keeps, by a part of their command line. All wait for a pipe.
KEPT_PROCESSES = (
    # From the first semaphore, shared memory or child of multiprocessing on, and joblib's own kind of it.
    "multiprocessing.resource_tracker",
    "loky.backend.resource_tracker",
    # How multiprocessing starts its children by default from Python 3.14 on.
    "multiprocessing.forkserver",
    # From the first torch.compile on.
    "torch/_inductor/compile_worker",
    # From the first tensor on that shares its memory by the strategy file_system.
    "torch_shm_manager",
)

#: Those whose own children belong to the library, too.
KEPT_FAMILIES = ("torch/_inductor/compile_worker",)

#: Handlers that a library sets once and keeps, by the module that they are in.
KEPT_HANDLERS = (
    # DataLoader's of SIGCHLD looks whether a worker has died, from the first that had workers on.
    "torch.utils.data._utils.signal_handling",
)

#: What all later work with torch depends on, as attributes or functions of it.
TORCH_SETTINGS = (
    *("get_default_dtype", "get_default_device", "get_num_threads", "get_float32_matmul_precision"),
    *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled", "is_autocast_enabled"),
    "backends.mkldnn.enabled",
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled"),
    "backends.cuda.math_sdp_enabled",
)

#: How long what has been told to end may take to do so (seconds): it costs less than ranks that start anew.
SETTLE_S, LOOK_S = 0.2, 0.005

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Leftovers:
    """Compares this process with what it was when this was made."""

    def __init__(self) -> None:
        self._settings = _settings()
        self._limits = _limits()
        self._threads = set(_threads())
        self._children = set(_children())

    def found(self) -> list[str]:
        """What is left, in words; nothing if it is as it was."""
        deadline = time.monotonic() + SETTLE_S
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        now, limits = _settings(), _limits()
        changed = [name for name, value in now.items() if value != self._settings[name]]
        # One that was raised harms nobody.
        lowered = [f"limit {name}" for name, value in limits.items() if value < self._limits[name]]
        return [*running, *changed, *lowered]

    def _running(self) -> list[str]:
        threads = [name for ident, name in _threads().items() if ident not in self._threads]
        children = [
            f"process {pid} ({command})" for pid, command in _children().items() if pid not in self._children
        ]
        return [f"thread {name}" for name in threads] + children


def _settings() -> dict[str, object]:
    torch = sys.modules.get("torch")
    dist = sys.modules.get("torch.distributed")
    return {
        "search path": tuple(sys.path),
        "cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "tracing": (sys.gettrace(), sys.getprofile(), _traces_memory()),
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "timers": [any(signal.getitimer(timer)) for timer in TIMERS],
        "signal handlers": {number: _handler(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "standard streams": [*map(_stream, (sys.stdin, sys.stdout, sys.stderr)), *map(_file, range(3))],
        **{f"torch.{name}": _of_torch(torch, name) for name in TORCH_SETTINGS},
        "torch.autocast on the CPU": _autocasts_on_cpu(torch),
        "process group": dist is not None and dist.is_available() and dist.is_initialized(),
    }


def _autocasts_on_cpu(torch: Any) -> bool:
    # Before torch 2.4 it took no argument.
    with suppress(AttributeError, TypeError):
        return bool(torch.is_autocast_enabled("cpu"))
    return False


def _traces_memory() -> bool:
    tracemalloc = sys.modules.get("tracemalloc")
    return tracemalloc is not None and bool(tracemalloc.is_tracing())


def _handler(number: int) -> object:
    handler = signal.getsignal(number)
    return signal.SIG_DFL if getattr(handler, "__module__", None) in KEPT_HANDLERS else handler


def _stream(stream: Any) -> tuple[object, object]:
    return stream, getattr(stream, "closed", True)


def _file(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _of_torch(torch: Any, name: str) -> object:
    try:
        value = attrgetter(name)(torch)
        return value() if callable(value) else value
    except AttributeError:
        # Another version has others.
        return None
    except Exception as error:
        # Such as of the precision, once it was set in the old way and in the new one.
        return type(error)


def _limits() -> dict[str, float]:
    """What a process may use of each resource; nothing is more than no limit."""
    import resource

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
    return {name: float("inf") if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _threads() -> dict[int, str]:
    """Names of the threads that run Python, by their numbers, but for this one and those of libraries.

    Threads that never run Python, such as those of OpenMP, are not seen: libraries start and keep them.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {
        ident: names.get(ident, "without a name")
        for ident, frame in frames.items()
        if ident != threading.get_ident() and not _is_kept(frame)
    }


def _is_kept(frame: FrameType) -> bool:
    if frame.f_code.co_name == "_worker" and _module(frame) == "concurrent.futures.thread":
        # Of an executor, waiting for work: with the test gone, nobody gives it any.
        return True
    work, above = frame, frame.f_back
    while above is not None:
        # What it was started for comes right after the frames of threading, which started it.
        work, above = (above if _module(above) != "threading" else work), above.f_back
    return _module(work).startswith(KEPT_THREADS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _children() -> dict[int, str]:
    """Command lines of the processes that come of this one, but for those of libraries."""
    if not _may_have_children():
        return {}
    below, found = proctree.children_by_parent(), {}
    for pid in below.get(os.getpid(), ()):
        command = _command(pid)
        if not any(kept in command for kept in KEPT_PROCESSES):
            found[pid] = command
        elif not any(kept in command for kept in KEPT_FAMILIES):
            # Its forks have its command line, and are the test's.
            found.update((child, _command(child)) for child in below.get(pid, ()))
    return found


def _may_have_children() -> bool:
    """Cheap, however many processes the host has; not every kernel tells (proc_tid_children(5))."""
    with suppress(OSError):
        tasks = list(Path("/proc/self/task").iterdir())
        if (tasks[0] / "children").exists():
            return any(_has_children(task) for task in tasks)
    return True


def _has_children(task: Path) -> bool:
    # A thread may end meanwhile.
    with suppress(OSError):
        return bool((task / "children").read_bytes())
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return (
            (proctree.PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""
