# SPDX-License-Identifier: Apache-2.0
"""Wakes who waits in the queue when something has changed there: inotify on the lock directory.

It saves time and nothing depends on it: where there is none, or an event comes too early, the next look is
soon.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import time

from pytest_llenergy.devices.lockdir import Directory
from pytest_llenergy.devices.queue import NAME

#: Bits of events (Linux: include/uapi/linux/inotify.h).
CLOSE_WRITE, MOVED_FROM, MOVED_TO, DELETE, OVERFLOW = 0x8, 0x40, 0x80, 0x200, 0x4000

HEADER = struct.Struct("iIII")
BUFFER_BYTES = 1 << 16

#: Longest sleeps between two looks (seconds), with and without the kernel's help.
WITH_EVENTS_S, WITHOUT_S = 0.25, 0.02


class Bell:
    """Rings for changes of others' tickets."""

    def __init__(self, directory: Directory, own: str) -> None:
        self._own = own
        self._descriptor = _watch(directory)
        self.longest_s: float = WITHOUT_S if self._descriptor is None else WITH_EVENTS_S

    def wait(self, seconds: float) -> bool:
        """Sleep so long, or until it rings. Returns whether it did."""
        if self._descriptor is None:
            # Nothing tells of changes here: the caller looks again after that, every ``WITHOUT_S``.
            time.sleep(seconds)
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            # Rounded up: a wait of no milliseconds would be none.
            if poll.poll(left_s * 1000 + 1) and self._rings(os.read(self._descriptor, BUFFER_BYTES)):
                return True
        return False

    def close(self) -> None:
        """Release the descriptor. Called once."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _rings(self, events: bytes) -> bool:
        place, rings = 0, False
        while place < len(events):
            _, bits, _, length = HEADER.unpack_from(events, place)
            name = events[place + HEADER.size :][:length].rstrip(b"\0").decode(errors="replace")
            place += HEADER.size + length
            rings = rings or bool(bits & OVERFLOW) or self._matters(bits, name)
        return rings

    def _matters(self, bits: int, name: str) -> bool:
        """Somebody left the queue, died, or took or gave up devices."""
        match = NAME.fullmatch(name)
        if match is None or match[2] == self._own or match[1] == "new":
            return False
        return match[1] == "holding" or not bits & MOVED_TO


def _watch(directory: Directory) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        return None
    path = f"/proc/self/fd/{directory.descriptor}".encode()
    if library.inotify_add_watch(descriptor, path, CLOSE_WRITE | MOVED_FROM | MOVED_TO | DELETE) < 0:
        os.close(descriptor)
        return None
    return descriptor
