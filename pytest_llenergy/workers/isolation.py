# SPDX-License-Identifier: Apache-2.0
"""Isolate tests that share a rank: restore its state after a test, or detect that this is impossible.

Environment, working directory and umask are restored. Whatever else is detected (threads, processes,
settings of Python and torch, memory) ends the rank, so that the next test gets a new one.
"""

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
from typing import Any, Literal

from pytest_llenergy.workers import proctree, timeouts

#: Which tests share ranks: none; those with the same backend and model; all, which then replace the model.
Isolation = Literal["test", "backend", "run"]

#: How much more memory than after their first test ranks may keep: the larger of these (bytes, share).
GROWTH_BYTES, GROWTH_SHARE = 256 << 20, 0.25

#: Threads that a library starts once and keeps, by the module whose function they run. All are idle.
KEPT_THREADS = (
    # Checks progress bars every ten seconds; loading a model starts it.
    "tqdm._monitor",
    # Read answers of torch.compile's own processes, and quiesce these.
    "torch._inductor.compile_worker",
    # Shares descriptors, once the first was put into a queue, such as those of torch's tensors.
    "multiprocessing.resource_sharer",
)

#: Processes that a library starts once and keeps, by a part of their command line. All wait on a pipe.
KEPT_PROCESSES = (
    # Started with the first semaphore, shared memory or process of multiprocessing, or of joblib.
    "multiprocessing.resource_tracker",
    "loky.backend.resource_tracker",
    # The default start method of multiprocessing since Python 3.14.
    "multiprocessing.forkserver",
    # Started with the first torch.compile.
    "torch/_inductor/compile_worker",
    # Started with the first tensor that is shared by the strategy file_system.
    "torch_shm_manager",
)

#: Such processes whose own children belong to the library, too.
KEPT_PROCESS_TREES = ("torch/_inductor/compile_worker",)

#: Signal handlers that a library sets once and keeps, by their module.
KEPT_HANDLERS = (
    # DataLoader's handler of SIGCHLD checks for dead workers, once the first had any.
    "torch.utils.data._utils.signal_handling",
)

#: Settings that all later work with torch depends on, as attributes or functions of it.
TORCH_SETTINGS = (
    *("get_default_dtype", "get_default_device", "get_num_threads", "get_float32_matmul_precision"),
    *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled", "is_autocast_enabled"),
    "backends.mkldnn.enabled",
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled"),
    "backends.cuda.math_sdp_enabled",
)

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class RestorableState:
    """Environment, working directory and umask of this process when this object was created."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        # Kept open, so that it can be restored even if it is renamed.
        self._directory = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._umask = os.umask(0o077)
        os.umask(self._umask)

    def restore(self) -> None:
        """Restore the saved state."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.fchdir(self._directory)
        os.umask(self._umask)


class Leftovers:
    """Compares this process with its state when this object was created."""

    def __init__(self) -> None:
        self._settings = _settings()
        self._limits = _limits()
        self._threads = set(_threads())
        self._children = set(_children())

    def find(self) -> list[str]:
        """Return descriptions of leftover threads and processes and of changed settings."""
        deadline = time.monotonic() + timeouts.LEFTOVERS_TIMEOUT_S
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(timeouts.LEFTOVERS_POLL_S)
        now, limits = _settings(), _limits()
        changed = [name for name, value in now.items() if value != self._settings[name]]
        # A raised limit does no harm.
        lowered = [f"limit {name}" for name, value in limits.items() if value < self._limits[name]]
        return [*running, *changed, *lowered]

    def _running(self) -> list[str]:
        threads = [name for ident, name in _threads().items() if ident not in self._threads]
        children = [
            f"process {pid} ({command})" for pid, command in _children().items() if pid not in self._children
        ]
        return [f"thread {name}" for name in threads] + children


def has_grown(now: int | None, first: int | None) -> bool:
    """Return whether a rank uses much more memory now than after its first test (both in bytes)."""
    if now is None or first is None:
        return False
    return now - first > max(GROWTH_BYTES, GROWTH_SHARE * first)


def _settings() -> dict[str, object]:
    torch = sys.modules.get("torch")
    dist = sys.modules.get("torch.distributed")
    return {
        "search path": tuple(sys.path),
        "cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "tracing": (sys.gettrace(), sys.getprofile(), _is_tracing_memory()),
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "timers": [any(signal.getitimer(timer)) for timer in TIMERS],
        "signal handlers": {number: _handler(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "standard streams": [
            *map(_stream_state, (sys.stdin, sys.stdout, sys.stderr)),
            *map(_file_identity, range(3)),
        ],
        **{f"torch.{name}": _torch_setting(torch, name) for name in TORCH_SETTINGS},
        "torch.autocast on the CPU": _is_autocast_on_cpu(torch),
        "process group": dist is not None and dist.is_available() and dist.is_initialized(),
    }


def _is_autocast_on_cpu(torch: Any) -> bool:
    # Before torch 2.4 it took no argument.
    with suppress(AttributeError, TypeError):
        return bool(torch.is_autocast_enabled("cpu"))
    return False


def _is_tracing_memory() -> bool:
    tracemalloc = sys.modules.get("tracemalloc")
    return tracemalloc is not None and bool(tracemalloc.is_tracing())


def _handler(number: int) -> object:
    handler = signal.getsignal(number)
    return signal.SIG_DFL if getattr(handler, "__module__", None) in KEPT_HANDLERS else handler


def _stream_state(stream: Any) -> tuple[object, object]:
    return stream, getattr(stream, "closed", True)


def _file_identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _torch_setting(torch: Any, name: str) -> object:
    try:
        value = attrgetter(name)(torch)
        return value() if callable(value) else value
    except AttributeError:
        # This version of torch lacks it.
        return None
    except Exception as error:
        # torch raises for the matmul precision once both its old and its new interface were used.
        return type(error)


def _limits() -> dict[str, float]:
    """Return the soft limit of each resource; infinity for no limit."""
    import resource

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
    return {name: float("inf") if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _threads() -> dict[int, str]:
    """Return the names of other threads that run Python, by their idents, without those of ``KEPT_THREADS``.

    Threads that never run Python, such as OpenMP's, are not included: libraries start and keep them.
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
        # An idle thread of an executor: nothing submits work to it after the test.
        return True
    target, above = frame, frame.f_back
    while above is not None:
        # The thread's target follows the frames of threading, which called it.
        target, above = (above if _module(above) != "threading" else target), above.f_back
    return _module(target).startswith(KEPT_THREADS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _children() -> dict[int, str]:
    """Return the command lines of child processes, by pid, without those of ``KEPT_PROCESSES``."""
    if not _may_have_children():
        return {}
    below, children = proctree.children_by_parent(), {}
    for pid in below.get(os.getpid(), ()):
        command = _command(pid)
        if not any(kept in command for kept in KEPT_PROCESSES):
            children[pid] = command
        elif not any(kept in command for kept in KEPT_PROCESS_TREES):
            # Forks of such a process have its command line, but belong to the test.
            children.update((child, _command(child)) for child in below.get(pid, ()))
    return children


def _may_have_children() -> bool:
    """Return quickly whether this process may have children, however many processes the host has.

    Not every kernel lists the children of a thread (proc_tid_children(5)).
    """
    with suppress(OSError):
        tasks = list(Path("/proc/self/task").iterdir())
        if (tasks[0] / "children").exists():
            return any(_has_children(task) for task in tasks)
    return True


def _has_children(task: Path) -> bool:
    # The thread may have ended meanwhile.
    with suppress(OSError):
        return bool((task / "children").read_bytes())
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return (
            (proctree.PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""
