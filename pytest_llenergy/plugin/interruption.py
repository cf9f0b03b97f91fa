# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C waits while a record is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold off Ctrl-C during the block, which must be short, and act on it at the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted, and only it may set a handler.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
