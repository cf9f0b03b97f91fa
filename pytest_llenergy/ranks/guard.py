# SPDX-License-Identifier: Apache-2.0
"""A parent process that cleans up after a process which may hang or be killed.

A process that imports torch cannot watch pytest at the same time. Its guard does, and adopts what it leaves
behind. Standard library only and one thread.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.ranks import proctree, timeouts

#: Signals that ask a process to end.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: The directory that contains this package.
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class Signals:
    """Collects the signals that end this process or report the end of a child, without acting on them."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        for each in self._ends:
            os.set_blocking(each, False)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ENDING_SIGNALS):
            signal.signal(number, lambda *_: None)

    def wait(self, others: Iterable[int] = (), timeout_s: float | None = None) -> tuple[set[int], int | None]:
        """Return the descriptors that became readable, and a signal that has asked this process to end."""
        poll = select.poll()
        for each in (self._ends[0], *others):
            poll.register(each, select.POLLIN)
        readable = {each for each, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)}
        ending = None
        with suppress(BlockingIOError):
            ending = next((each for each in os.read(self._ends[0], 4096) if each in ENDING_SIGNALS), None)
        return readable, ending

    def close(self) -> tuple[int, int]:
        """Restore Python's own behaviour, in a fork. Returns descriptors to close."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *ENDING_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._ends


def fork_under_guard(parent_pid: int, directory: str, descriptor: int) -> None:
    """Continue in a child process; the calling process becomes its guard, and ends as the child does.

    When the guard is asked to end or ``parent_pid`` is gone, the child gets SIGTERM, and after a while
    everything is killed, as is whatever the child leaves behind. ``directory`` is removed if the parent is
    gone, and only the child keeps ``descriptor`` open.
    """
    proctree.become_subreaper()
    pid = os.getpid()
    if child := os.fork():
        os.close(descriptor)
        _guard(parent_pid, directory, child)
    die_with_parent(pid)


def _guard(parent_pid: int, directory: str, child: int) -> NoReturn:
    signals = Signals()
    deadline_s: float | None = None
    ending: int | None = None
    while (status := dict(proctree.reap()).get(child)) is None:
        if deadline_s is None and (ending is not None or os.getppid() != parent_pid):
            deadline_s = time.monotonic() + timeouts.GUARDED_STOP_TIMEOUT_S
            os.kill(child, signal.SIGTERM)
        elif deadline_s is not None and time.monotonic() > deadline_s:
            # The child is stopped or hangs.
            proctree.kill_tree({child, *proctree.children()})
        ending = signals.wait(timeout_s=timeouts.ORPHAN_POLL_S)[1]
    # Whoever waits for this process, such as Slurm, would kill what outlives it.
    proctree.kill_children()
    if os.getppid() != parent_pid:
        shutil.rmtree(directory, ignore_errors=True)
    # As a shell does: by what number the child was ended.
    os._exit(status if status >= 0 else 128 - status)
