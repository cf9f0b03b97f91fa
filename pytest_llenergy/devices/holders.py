# SPDX-License-Identifier: Apache-2.0
"""Who holds or queues for devices: each process writes one line in a file of its own, for others to show."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory, user_name
from pytest_llenergy.record.base import MALFORMED
from pytest_llenergy.record.text import escape_invisible, shorten

SUFFIX = ".holder"

#: What is read of a line of others, and written of the name of a test.
MAX_LINE_BYTES, MAX_NAME = 1 << 14, 200


class Holder(msgspec.Struct, frozen=True):
    """A process: its pid, the test, since when (seconds since the epoch), its own and its shared devices."""

    pid: int
    test: str
    since_s: float
    devices: list[str]
    shared: list[str]


class HolderFile:
    """The file of one holder, which is locked while the holder, or a process that it lent to, lives."""

    def __init__(self, directory: LockDirectory) -> None:
        self._directory = directory
        self.name = f"{FILE_PREFIX}{os.urandom(8).hex()}{SUFFIX}"
        self.descriptor = directory.create(self.name)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def write(self, test: str, devices: Iterable[str], shared: Iterable[str]) -> None:
        """Replace the line."""
        test = shorten(escape_invisible(test), MAX_NAME)
        holder = Holder(os.getpid(), test, time.time(), sorted(devices), sorted(shared))
        # For messages only, so a full disk must not fail the test.
        with suppress(OSError):
            line = msgspec.json.encode(holder) + b"\n"
            os.pwrite(self.descriptor, line, 0)
            os.ftruncate(self.descriptor, len(line))

    def remove(self) -> None:
        """Close the file, and remove it unless a process that was left running still holds it."""
        os.close(self.descriptor)
        _read(self._directory, self.name)


def describe_leases(directory: LockDirectory) -> list[str]:
    """Return one line for each process that holds exclusive devices or queues for some."""
    found = list_holders(directory)
    return [f"{', '.join(holder.devices)} held by {who}" for holder, who in found if holder.devices]


def list_holders(directory: LockDirectory, without: str = "") -> list[tuple[Holder, str]]:
    """Return the living holders but that of the file ``without``, each with a description of the process."""
    names = directory.list_names(FILE_PREFIX, SUFFIX)
    found = [_read(directory, name) for name in names if name != without]
    return [each for each in found if each is not None]


def _read(directory: LockDirectory, name: str) -> tuple[Holder, str] | None:
    """Read the line of a holder; remove that of a dead one, if this user may."""
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory.descriptor)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # An unreadable line is just being written, or not of us.
        with suppress(*MALFORMED, OSError, OverflowError):
            holder = msgspec.json.decode(os.pread(descriptor, MAX_LINE_BYTES, 0), type=Holder)
            return holder, _describe(holder, user_name(os.fstat(descriptor).st_uid))
    else:
        # An empty one is just being made.
        with suppress(OSError):
            if os.fstat(descriptor).st_size:
                os.unlink(name, dir_fd=directory.descriptor)
    finally:
        os.close(descriptor)
    return None


def _describe(holder: Holder, user: str) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_s))
    test = f" ({holder.test})" if holder.test else ""
    return f"process {holder.pid} of {user} since {since}{test}"
