# SPDX-License-Identifier: Apache-2.0
"""A rank that holds its host's part of a model, while a rank of another host generates with all of it.

The backend has started the part's processes, which obey the first rank. This rank answers the requests of
pytest, and ends if one of them does: the first rank might wait for it for minutes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
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
    """Ends this process as soon as one of the processes of its backend ends, until ``stop``."""

    def __init__(self, workers: Sequence[BackendWorker]) -> None:
        self._stopped, self._stop = os.pipe()
        pids = {worker.pid for worker in workers} - {0, os.getpid()}
        self._thread = threading.Thread(target=self._run, args=(pids,), daemon=True, name="worker watch")
        self._thread.start()

    def stop(self) -> None:
        """Let the processes end from now on."""
        os.close(self._stop)
        self._thread.join()
        os.close(self._stopped)

    def _run(self, pids: Iterable[int]) -> None:
        watched: dict[int, int] = {}
        for pid in pids:
            try:
                watched[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                _end_rank(pid)
            except (OSError, AttributeError):
                # Without pidfds the time limit of the test has to do.
                continue
        ended = wait([self._stopped, *watched])
        if self._stopped not in ended:
            _end_rank(next(pid for each, pid in watched.items() if each in ended))
        for descriptor in watched:
            os.close(descriptor)


def _end_rank(pid: int) -> NoReturn:
    with suppress(Exception):
        sys.stdout.write(f"a process of the backend has ended (pid {pid}), and this rank with it\n")
        sys.stdout.flush()
    os._exit(1)
