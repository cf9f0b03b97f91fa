# SPDX-License-Identifier: Apache-2.0
"""Find what is left of a run: processes, by a marker in their environment and not by parentage; leases."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire

MARKER = "TEST_RUN_MARKER"


def survivors(mark: str) -> dict[int, str]:
    """Return the command lines of living processes with the marker, by pid."""
    wanted = f"{MARKER}={mark}".encode()
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and wanted in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def await_none(mark: str, limit_s: float = 60.0) -> dict[int, str]:
    """Wait until no marked process lives. Returns those that still do at the time limit."""
    deadline = time.monotonic() + limit_s
    while (found := survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def marked() -> Iterator[str]:
    """Mark the processes that the block starts, and kill those that are left in the end."""
    mark = uuid.uuid4().hex
    before = os.environ.get(MARKER)
    os.environ[MARKER] = mark
    try:
        yield mark
    finally:
        if before is None:
            del os.environ[MARKER]
        else:
            os.environ[MARKER] = before
        for pid in survivors(mark):
            # It may end by itself meanwhile.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def check_nothing_is_left(mark: str) -> None:
    """Check that no marked process lives, and that the CPU is not leased."""
    assert await_none(mark) == {}
    # A killed process is a zombie as soon as its first thread has ended; the last one gives its locks back.
    acquire(LockRequest((DeviceLock(CPU),)), 30.0).release()


def alive(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
