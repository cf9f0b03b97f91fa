# SPDX-License-Identifier: Apache-2.0
"""A rank that holds its host's part of a model, while a rank of another host generates with all of it.

The backend has started the part's processes, which obey the first rank. This rank answers the requests of
pytest, and ends if one of them does: the first rank might wait for it for minutes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.backends.tasks import Generation


class FollowerJob:
    """Nothing to do, and no results: both are the first rank's."""

    def run(self) -> None:
        """See ``Job``."""

    def result(self, _outcome: None) -> Generation:
        """See ``Job``."""
        return Generation(texts=[], token_ids=[], requests=[])


class WorkerWatch:
    """Ends this process as soon as one of its backend's processes ends, until ``stop``.

    Args:
        workers: The processes.
    """

    def __init__(self, workers: Sequence[BackendWorker]) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        for pid in {worker.pid for worker in workers} - {0, os.getpid()}:
            try:
                self._pids[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                _end_rank([pid])
            except (OSError, AttributeError):
                # Without pidfds the time limit of the test has to do.
                continue
        self._stopped, self._stop = os.pipe()
        for descriptor in (self._stopped, *self._pids):
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(
            target=self._run, daemon=True, name="watch of the backend's processes"
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the processes end from now on."""
        os.close(self._stop)
        self._thread.join()
        for descriptor in (self._stopped, *self._pids):
            os.close(descriptor)

    def _run(self) -> None:
        readable = {descriptor for descriptor, _ in self._poll.poll()}
        if self._stopped not in readable:
            _end_rank([pid for descriptor, pid in self._pids.items() if descriptor in readable])


def _end_rank(ended: Sequence[int]) -> NoReturn:
    pids = ", ".join(map(str, ended))
    with suppress(Exception):
        sys.stdout.write(f"a process of the backend has ended (pid {pids}), and this rank with it\n")
        sys.stdout.flush()
    os._exit(1)
