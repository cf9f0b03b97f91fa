# SPDX-License-Identifier: Apache-2.0
"""Watch the boards of a lease while they are measured."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from pytest_llenergy.devices.condition import Condition, ConditionReader
from pytest_llenergy.errors import DeviceError

#: Interval between two readings of the boards' condition during the work: rare enough to cost nothing, and
#: frequent enough to detect a process that affects the result.
CONDITION_POLL_S = 0.5


class BoardMonitor(Protocol):
    """Reads the condition of the measured boards."""

    def read(self) -> Mapping[str, Condition]:
        """Return conditions by UUID; empty without boards."""

    def find_others(self, pids: Collection[int]) -> Sequence[str]:
        """Return the UUIDs of boards that are not measured and that these processes use."""


class NoBoards:
    """A ``BoardMonitor`` without boards."""

    def read(self) -> dict[str, Condition]:
        """Return no conditions."""
        return {}

    def find_others(self, pids: Collection[int]) -> Sequence[str]:
        """Return no boards."""
        return ()


@contextmanager
def watch_boards(uuids: Sequence[str]) -> Iterator[BoardMonitor]:
    """Monitor the boards of a lease. If that is impossible, measure without it."""
    try:
        watch = ConditionReader(uuids) if uuids else None
    except DeviceError:
        watch = None
    if watch is None:
        yield NoBoards()
        return
    try:
        yield watch
    finally:
        watch.close()


@contextmanager
def collect_conditions(watch: BoardMonitor) -> Iterator[list[Mapping[str, Condition]]]:
    """Collect the conditions of the boards every half second until the block ends.

    This detects processes that start and end during the work.
    """
    conditions: list[Mapping[str, Condition]] = []
    ended = threading.Event()

    def collect() -> None:
        while not ended.wait(CONDITION_POLL_S):
            conditions.append(watch.read())

    if not watch.read():
        yield conditions
        return
    thread = threading.Thread(target=collect, name="llenergy-conditions", daemon=True)
    thread.start()
    try:
        yield conditions
    finally:
        ended.set()
        thread.join()
