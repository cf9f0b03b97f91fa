# SPDX-License-Identifier: Apache-2.0
"""Looks at the boards while the work runs: who came and went would not show before or after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from pytest_llenergy.devices.condition import Condition

#: Seconds between two looks: rare enough to cost nothing, often enough to see a process that does harm.
EVERY_S = 0.5


class Watch(Protocol):
    """Tells the condition of the boards that are measured."""

    def read(self) -> Mapping[str, Condition]:
        """By UUID; empty where there are no boards."""


@contextmanager
def looking_out(watch: Watch) -> Iterator[list[Mapping[str, Condition]]]:
    """Collect the conditions of the boards every half second until the block ends."""
    seen: list[Mapping[str, Condition]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(EVERY_S):
            seen.append(watch.read())

    if not watch.read():
        yield seen
        return
    thread = threading.Thread(target=look, name="llenergy-lookout", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
