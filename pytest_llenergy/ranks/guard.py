# SPDX-License-Identifier: Apache-2.0
"""A parent process that cleans up after a process which may hang.

A process that imports torch, or takes a step that may never end, cannot monitor pytest at the same time. Its
guard does so, and adopts its descendants: however the process, its guard or pytest ends, no descendant is
left behind. This module uses only the standard library and one thread, and the guard imports nothing for
others.
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

from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.ranks import proctree, timeouts

#: Signals that ask a process to end, which a guard passes on.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: The directory that contains this package.
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])

#: Not run with ``-m``, which would put another directory first on the search path.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from pytest_llenergy.ranks.guard import main
main(*sys.argv[2:])
"""


def fork_under_guard(parent_pid: int, directory: str, descriptor: int) -> None:
    """Continue in a child process; the calling process becomes its guard, and ends as the child does.

    When the guard is asked to end or ``parent_pid`` is gone, the child gets SIGTERM, and after a while
    everything is killed. Whatever the child leaves behind is killed, and ``directory`` removed if the parent
    is gone.

    Args:
        parent_pid: The process whose end ends the child.
        directory: Removed if the parent is gone, since the parent cannot.
        descriptor: An open file that only the child keeps.
    """
    proctree.become_subreaper()
    pid = os.getpid()
    child = os.fork()
    if child != 0:
        os.close(descriptor)
        _Guard(parent_pid, directory, child).run()
    die_with_parent(pid)


class _Guard:
    def __init__(self, parent_pid: int, directory: str, child: int) -> None:
        self._parent_pid = parent_pid
        self._directory = directory
        self._child = child
        self._status: int | None = None
        self._must_end = False
        self._signal_pipe, wake = os.pipe()
        for each in (self._signal_pipe, wake):
            os.set_blocking(each, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ENDING_SIGNALS:
            signal.signal(number, self._on_ending_signal)
        self._parent_pidfd: int | None = None
        with suppress(OSError, AttributeError):
            self._parent_pidfd = os.pidfd_open(parent_pid)

    def run(self) -> NoReturn:
        """Wait for the end of the child; stop it if this process must end or the parent is gone."""
        poll = select.poll()
        for source in (self._signal_pipe, self._parent_pidfd):
            if source is not None:
                poll.register(source, select.POLLIN)
        deadline_s: float | None = None
        while not self._reap():
            if deadline_s is None and (self._must_end or self._is_orphan()):
                deadline_s = time.monotonic() + timeouts.GUARDED_STOP_TIMEOUT_S
                if self._parent_pidfd is not None:
                    # The descriptor stays readable, so that poll would return at once every time.
                    poll.unregister(self._parent_pidfd)
                os.kill(self._child, signal.SIGTERM)
            elif deadline_s is not None and time.monotonic() > deadline_s:
                # The child is stopped or hangs.
                proctree.kill_tree({self._child, *self._children()}, but_restorers=True)
            polls = self._parent_pidfd is None or deadline_s is not None
            poll.poll(timeouts.ORPHAN_POLL_S * 1e3 if polls else None)
            with suppress(BlockingIOError):
                os.read(self._signal_pipe, 4096)
        self._kill_rest()
        if self._is_orphan():
            shutil.rmtree(self._directory, ignore_errors=True)
        self._exit_like_child(os.waitstatus_to_exitcode(self._status or 0))

    def _on_ending_signal(self, *_: object) -> None:
        self._must_end = True

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent_pid

    def _reap(self) -> bool:
        """Reap all ended descendants. Returns whether the child is among them."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    self._status = status
        return self._status is not None

    def _kill_rest(self) -> None:
        pause_s = timeouts.KILL_POLL_S
        deadline_s = time.monotonic() + timeouts.RESTORE_TIMEOUT_S
        while left := self._children():
            # Whoever waits for this process, such as Slurm, would kill what outlives it.
            proctree.kill_tree(left, but_restorers=time.monotonic() < deadline_s)
            self._reap()
            time.sleep(pause_s)
            # A process may be stuck in a driver for hours.
            pause_s = min(2 * pause_s, timeouts.STUCK_POLL_S)

    def _children(self) -> list[int]:
        return proctree.children_by_parent().get(os.getpid(), [])

    def _exit_like_child(self, code: int) -> NoReturn:
        if code < 0:
            import resource

            # The child has dumped its core already.
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def main(parent_pid: str, directory: str, descriptor: str, *command: str) -> None:
    """Run a command under a guard. The command inherits ``descriptor``.

    Args:
        parent_pid: Process whose end ends the command.
        directory: Directory to remove if the parent is gone.
        descriptor: Open file that the command inherits.
        *command: The command line.
    """
    fork_under_guard(int(parent_pid), directory, int(descriptor))
    os.execv(command[0], command)


def guarded_command(parent_pid: int, directory: Path, descriptor: int, command: list[str]) -> list[str]:
    """Return the command line of ``main``; its interpreter ignores sitecustomize and .pth files (``-S``).

    Args:
        parent_pid: Process whose end ends the command.
        directory: Directory to remove if the parent is gone.
        descriptor: Open file that the command inherits.
        command: The command line.
    """
    arguments = [str(parent_pid), str(directory), str(descriptor)]
    return [sys.executable, "-S", "-c", PROGRAM, PACKAGE_PARENT, *arguments, *command]
