# SPDX-License-Identifier: Apache-2.0
"""Isolate tests that share a rank: find what a test has left in it or changed.

``process_state`` restores what can be restored for certain. Whatever is found after that (threads, processes,
settings of the process and of torch, memory) ends the rank, so that the next test gets a new one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Literal

from pytest_llenergy.ranks import process_state, proctree, timeouts, torch_state

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

#: With one of these, OpenMP's idle threads may use their cores for long.
SPINNING_VARIABLES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")

#: Such processes whose own children belong to the library, too.
KEPT_PROCESS_TREES = ("torch/_inductor/compile_worker",)

#: How many more descriptors than before the first test may stay open. Libraries keep some; many could leave
#: too few for the next test.
KEPT_DESCRIPTORS = 32


class Leftovers:
    """Compares this process with its state when this object was created."""

    def __init__(self) -> None:
        self._settings = _settings()
        owners = [*process_state.PATCHABLE, *torch_state.patchable()]
        self._functions = process_state.functions(owners)
        self._scheduling = process_state.scheduling()
        self._library_threads = process_state.library_threads()
        self._tasks = set(_tasks())
        self._descriptors = process_state.count_descriptors()
        self._threads = set(_threads())
        self._children = set(_children())

    def find(self) -> list[str]:
        """Return descriptions of leftover threads, processes and files, and of changed settings."""
        deadline = time.monotonic() + timeouts.LEFTOVERS_TIMEOUT_S
        busy = self._busy()
        while ((running := self._running()) or busy) and time.monotonic() < deadline:
            time.sleep(timeouts.LEFTOVERS_POLL_S)
            busy &= self._busy()
        if busy and not running:
            running = ["a busy thread that does not run Python"]
        # Libraries keep idle threads, which spin for a while after each use.
        self._tasks.update(_tasks())
        before, now = self._settings, _settings()
        if not before["torch"] and now["torch"]:
            # Nobody knows what its settings were before.
            return [*running, "torch, which it has imported"]
        changed = [name for name in before | now if _differ(before.get(name), now.get(name))]
        replaced = [
            f"{owner}.{name}, which it has replaced"
            for owner, name, found in process_state.find_replaced(self._functions)
            if not torch_state.is_replaced_by_compile(name, found)
        ]
        # Those of a library that a test has imported are known since then.
        threads = self._library_threads
        changed += [
            f"number of threads of {Path(path).name}"
            for path, count in process_state.library_threads().items()
            if threads.setdefault(path, count) != count
        ]
        scheduling = process_state.find_scheduling_changes(self._scheduling, process_state.scheduling())
        opened = process_state.count_descriptors() - self._descriptors
        files = [f"{opened} open files"] if opened > KEPT_DESCRIPTORS else []
        return [*running, *changed, *replaced, *scheduling, *files]

    def _busy(self) -> set[str]:
        """Return the new tasks of this process that use a core at this moment."""
        if any(name in os.environ for name in SPINNING_VARIABLES):
            return set()
        return {task for task in _tasks() if task not in self._tasks and _is_busy(task)}

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


def _differ(before: object, now: object) -> bool:
    # Comparing large sets with themselves takes long.
    return before is not now and before != now


def _settings() -> dict[str, object]:
    return {**process_state.settings(), **torch_state.settings(), "torch": "torch" in sys.modules}


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


def _tasks() -> list[str]:
    """Return the ids of all threads of this process; none if the system does not list them."""
    with suppress(OSError):
        return os.listdir("/proc/self/task")  # noqa: PTH208
    return []


def _is_busy(task: str) -> bool:
    # The thread may have ended meanwhile.
    with suppress(OSError):
        return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


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
