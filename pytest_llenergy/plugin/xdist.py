# SPDX-License-Identifier: Apache-2.0
"""Support for pytest-xdist: number of workers, and messages from workers to the controller.

A worker sends messages over an execnet channel, which it finds in its ``workerinput``. A message has left the
worker when the call returns, so none is lost if the worker dies, and it arrives before the next report.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_llenergy.plugin.settings import read_settings, settings_of
from pytest_llenergy.plugin.stash import SKIPPED_FILES

if TYPE_CHECKING:
    from pytest_llenergy.record.base import Primitive

#: This plugin's key in ``workerinput``.
KEY = "llenergy"

#: Kinds of messages from a worker: why it got no GPUs, how many marks are wrong, how many GPUs each test
#: leases, which files were skipped at collection, which test begins, and a record.
FAILURE, WRONG, BOARDS, SKIPPED, BEGIN, RECORD = "failure", "wrong", "boards", "skipped", "begin", "record"

#: Overrides the number of workers of ``-n auto``.
AUTO_WORKERS_VARIABLE = "PYTEST_XDIST_AUTO_NUM_WORKERS"

#: Options with which pytest runs no test. xdist requests a number of workers with them too.
OPTIONS_WITHOUT_TESTS = (
    "collectonly",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "help",
    "version",
    "setupplan",
    "cacheshow",
)


class SentRecord(NamedTuple):
    """A record as JSON primitives, with the hosts of a cluster on which its test ran, by name."""

    record: dict[str, Primitive]
    hosts: dict[str, Primitive]


def useful_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto`` that leases can keep busy: one per GPU, else one.

    With ``--energy-worker-gpus=N`` it is one per N GPUs.

    A test on the CPU has the host to itself. If the GPUs cannot be counted, one worker starts.

    Returns:
        None, which leaves the number to xdist, for a run that neither keeps a report nor binds GPUs or runs
        no test, and if ``PYTEST_XDIST_AUTO_NUM_WORKERS`` is set.

    Raises:
        pytest.UsageError: An option has an invalid value. xdist calls this before ``pytest_configure``.
    """
    settings = read_settings(config)
    no_tests = any(config.getoption(name, default=False) for name in OPTIONS_WITHOUT_TESTS)
    uses_gpus = settings.keeps_something or settings.worker_gpus is not None
    if not uses_gpus or no_tests or os.environ.get(AUTO_WORKERS_VARIABLE):
        return None
    from pytest_llenergy.devices.allocation import count_leasable
    from pytest_llenergy.errors import DeviceError

    with suppress(DeviceError):
        return max(1, count_leasable(settings.gpus) // (settings.worker_gpus or 1))
    return 1


@dataclass
class WorkerInput:
    """What the controller passes to a worker.

    Attributes:
        channel: Channel of execnet for messages to the controller; None in a process that is not a worker.
    """

    channel: Any = None

    def send(self, kind: str, content: object) -> None:
        """Send a message of JSON primitives."""
        # The controller may have ended.
        with suppress(OSError):
            if self.channel is not None:
                self.channel.send((kind, content))


WORKER_INPUT = pytest.StashKey[WorkerInput]()


def worker_input_of(config: pytest.Config) -> WorkerInput:
    """Return what the controller passed; nothing in a process that is not a worker."""
    if WORKER_INPUT not in config.stash:
        config.stash[WORKER_INPUT] = WorkerInput(**getattr(config, "workerinput", {}).get(KEY, {}))
    return config.stash[WORKER_INPUT]


class WorkerTracker:
    """Plugin object of the controller: what its workers have sent.

    The thread that receives messages stores them; the main thread reads them when the next report arrives.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failures: dict[str, str] = {}
        self._wrong = 0
        self._boards_of: dict[str, int] = {}
        self._attempts: dict[tuple[str, str], int] = {}
        #: Records that the controller has not kept yet.
        self.arrived: deque[SentRecord] = deque()

    def pytest_sessionstart(self) -> None:
        option = self._config.option
        if settings_of(self._config).keeps_something and getattr(option, "maxschedchunk", 1) is None:
            # Chunks are given to a worker together: it would keep narrow tests while it waits for a wide one.
            option.maxschedchunk = 1

    @pytest.hookimpl(optionalhook=True, wrapper=True)
    def pytest_xdist_make_scheduler(self) -> Generator[None, object, object]:
        scheduler = yield
        from xdist.scheduler import LoadScheduling

        from pytest_llenergy.plugin.xdist_scheduling import LeaseScheduling

        # A scheduler of the project stays.
        if type(scheduler) is not LoadScheduling:
            return scheduler
        return LeaseScheduling(scheduler, self._count_boards, self._boards_of)

    def _count_boards(self) -> int:
        from pytest_llenergy.devices.allocation import count_leasable
        from pytest_llenergy.errors import DeviceError

        # Without a driver, tests that lease boards are skipped or use the CPU, one after the other.
        with suppress(DeviceError):
            return count_leasable(settings_of(self._config).gpus)
        return 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        channel = node.gateway.newchannel()
        channel.setcallback(partial(self._receive, node.gateway.id))
        node.workerinput[KEY] = {"channel": channel}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if node.gateway.id in self._failures:
            raise pytest.UsageError(self._failures[node.gateway.id])
        if self._wrong:
            # As without workers, before anything is measured.
            errors = f"{self._wrong} error{'s' if self._wrong > 1 else ''}"
            raise pytest.Session.Interrupted(f"{errors} during collection")

    def crashed_attempt(self, worker: str, node_id: str) -> int | None:
        """Return the attempt of the test in which a worker died; None if it measures nothing."""
        return self._attempts.get((worker, node_id))

    def _receive(self, worker: str, message: tuple[str, Any]) -> None:
        kind, content = message
        if kind == FAILURE:
            self._failures[worker] = content
        elif kind == WRONG:
            self._wrong = content
        elif kind == BOARDS:
            self._boards_of.update(content)
        elif kind == SKIPPED:
            self._config.stash[SKIPPED_FILES].update(content)
        elif kind == BEGIN:
            node_id, attempt = content
            self._attempts[worker, node_id] = attempt
        elif kind == RECORD:
            self.arrived.append(SentRecord(*content))
