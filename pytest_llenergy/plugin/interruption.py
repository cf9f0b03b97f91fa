# SPDX-License-Identifier: Apache-2.0
"""Runs that end early: which tests had their turn, and Ctrl-C while a record is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

#: Phases after whose reports a test still runs. Other reports end it: teardown, or a crash.
UNFINISHED = ("setup", "call")


@contextmanager
def hold_interrupts() -> Iterator[list[int]]:
    """Hold off Ctrl-C during the block, which must be short, and act on it at the end of the block.

    Yields:
        The signals held off so far.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted, and only it may set a handler.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield received
        return
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


class Turns:
    """Plugin object of a process that runs its own tests: whether each of them had its turn.

    The exit code cannot answer that: ``pytest.exit`` sets any, and a second Ctrl-C leaves that of success.
    """

    def __init__(self) -> None:
        # None until the loop begins: if another plugin blocks this one, nothing is known.
        self._selected: frozenset[str] | None = None
        self._ended: set[str] = set()
        self._uncollected = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # With --continue-on-collection-errors the run goes on without the tests of that file.
        self._uncollected = self._uncollected or report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        self._selected = frozenset(item.nodeid for item in session.items)
        return (yield)

    # Other plugins may run a test without reports, or report tests without this hook.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        self._ended.add(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in UNFINISHED:
            self._ended.add(report.nodeid)

    @property
    def tests_left_out(self) -> bool:
        """Whether a selected test did not run to its end, or a file was not collected."""
        return self._uncollected or self._selected is None or not self._selected <= self._ended


class RecordSender:
    """Plugin object of a worker of pytest-xdist: Ctrl-C does not stop a record on its way."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        if not hasattr(report, "llenergy"):
            return (yield)
        with hold_interrupts():
            return (yield)
