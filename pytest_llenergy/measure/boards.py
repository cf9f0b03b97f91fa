# SPDX-License-Identifier: Apache-2.0
"""Watch the boards of a lease while they are measured."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pytest_llenergy.devices.condition import Condition, ConditionReader
from pytest_llenergy.errors import DeviceError

#: Interval between two readings of the boards' condition during the work: rare enough to cost nothing, and
#: frequent enough to detect a process that affects the result.
CONDITION_POLL_S = 0.5


class BoardWatch:
    """Reads the condition of the measured boards; of none without a driver."""

    def __init__(self, uuids: Sequence[str]) -> None:
        try:
            self._reader = ConditionReader(uuids) if uuids else None
        except DeviceError:
            self._reader = None

    def read(self) -> Mapping[str, Condition]:
        """Return conditions by UUID; empty without boards."""
        return self._reader.read() if self._reader is not None else {}

    def find_others(self, pids: Collection[int]) -> Sequence[str]:
        """Return the UUIDs of boards that are not measured and that these processes use."""
        return self._reader.find_others(pids) if self._reader is not None else ()

    @contextmanager
    def collect(self) -> Iterator[list[Mapping[str, Condition]]]:
        """Collect conditions until the block ends: they show processes that start and end during the work."""
        conditions: list[Mapping[str, Condition]] = []
        ended = threading.Event()

        def collect() -> None:
            while not ended.wait(CONDITION_POLL_S):
                conditions.append(self.read())

        if self._reader is None:
            yield conditions
            return
        thread = threading.Thread(target=collect, name="llenergy-conditions", daemon=True)
        thread.start()
        try:
            yield conditions
        finally:
            ended.set()
            thread.join()

    def close(self) -> None:
        """Close the driver."""
        if self._reader is not None:
            self._reader.close()
