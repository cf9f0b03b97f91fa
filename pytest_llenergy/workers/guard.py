# SPDX-License-Identifier: Apache-2.0
"""A process around one that may hang: whatever ends either of them, or their parent, nothing is left behind.

Standard library only, one thread, and it imports nothing for others. Whoever imports torch, or takes a step
that may never come to its end, cannot watch anything meanwhile; its guard can, and adopts what it starts.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pytest_llenergy.workers import proctree

#: How often to look for what the kernel does not tell of (seconds): a parent without pidfd, what is stuck.
LOOK_S = 0.2
#: How long to wait at first for what has been killed (seconds); then ever longer.
PAUSE_S = 0.002
#: How long a child that was told to end may take to do so by itself (seconds).
PATIENCE_S = 3.0

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: Where this package is.
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])

#: Not run as a module, which would take a search path of its own.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.workers.guard import main
main(*sys.argv[2:])
"""


def fork_under_guard(parent_pid: int, directory: str, descriptor: int) -> int:
    """Go on in a child; the process that calls this stays behind as its guard, and ends as the child does.

    The child ends, with all that came of it, when this process is told to end or ``parent_pid`` is gone, and
    ``directory`` is then removed. ``descriptor`` is the child's alone. Returns, in the child, a descriptor:
    once that has been written to the child is told by SIGTERM instead, and ends by itself.
    """
    proctree.become_subreaper()
    pid = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child != 0:
        os.close(write)
        os.close(descriptor)
        _Guard(parent_pid, directory, child, read).run()
    os.close(read)
    proctree.die_with_parent(pid)
    return write


class _Guard:
    def __init__(self, parent_pid: int, directory: str, child: int, told: int) -> None:
        self._parent_pid = parent_pid
        self._directory = directory
        self._child = child
        self._told = told
        self._status: int | None = None
        self._must_end = False
        self._woken, wake = os.pipe()
        for each in (self._woken, wake):
            os.set_blocking(each, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ENDING_SIGNALS:
            signal.signal(number, self._on_end)
        self._parent: int | None = None
        with suppress(OSError, AttributeError):
            self._parent = os.pidfd_open(parent_pid)

    def run(self) -> NoReturn:
        """Wait for the end of the child, and see to it when the time has come."""
        heard = select.poll()
        for source in (self._woken, self._parent):
            if source is not None:
                heard.register(source, select.POLLIN)
        deadline_s: float | None = None
        while not self._reap():
            if deadline_s is None and (self._must_end or self._is_orphan()):
                deadline_s = time.monotonic() + PATIENCE_S
                if self._parent is not None:
                    # It would be told of its end for ever.
                    heard.unregister(self._parent)
                self._end_child()
                continue
            if deadline_s is not None and time.monotonic() > deadline_s:
                # It was stopped, or waits for somebody.
                proctree.kill_tree({self._child, *self._children()})
            heard.poll(LOOK_S * 1e3 if self._parent is None or deadline_s is not None else None)
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        self._end_rest()
        if self._is_orphan():
            shutil.rmtree(self._directory, ignore_errors=True)
        self._end_as(os.waitstatus_to_exitcode(self._status or 0))

    def _on_end(self, *_: object) -> None:
        self._must_end = True

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent_pid

    def _reap(self) -> bool:
        """Whether the child has ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    self._status = status
        return self._status is not None

    def _end_child(self) -> None:
        ready, _, _ = select.select([self._told], [], [], 0)
        if ready and os.read(self._told, 1):
            os.kill(self._child, signal.SIGTERM)
        else:
            proctree.kill_tree({self._child, *self._children()})

    def _end_rest(self) -> None:
        pause_s = PAUSE_S
        while left := self._children():
            proctree.kill_tree(left)
            self._reap()
            time.sleep(pause_s)
            # What is stuck in a driver may be so for hours.
            pause_s = min(2 * pause_s, LOOK_S)

    def _children(self) -> list[int]:
        return proctree.children_by_parent().get(os.getpid(), [])

    def _end_as(self, code: int) -> NoReturn:
        if code < 0:
            import resource

            # The core is that of the child.
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def main(parent_pid: str, directory: str, descriptor: str, *command: str) -> None:
    """Become a program with a guard around it. The program inherits ``descriptor``."""
    fork_under_guard(int(parent_pid), directory, int(descriptor))
    os.execv(command[0], command)


def guarded_command(parent_pid: int, directory: Path, descriptor: int, command: list[str]) -> list[str]:
    """The command line of ``main``, in an interpreter that no sitecustomize or .pth file has a part in."""
    own = [str(parent_pid), str(directory), str(descriptor)]
    return [sys.executable, "-S", "-c", PROGRAM, PACKAGE_PARENT, *own, *command]
