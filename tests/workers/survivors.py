# SPDX-License-Identifier: Apache-2.0
"""What is left of a run: processes found by a marker in their environment, not by parentage, and leases."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire

MARKER = "TEST_RUN_MARKER"


def survivors(mark: str) -> dict[int, str]:
    """Command lines of the living processes that carry the mark, by pid."""
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
    """Those that are still there when the time is up, or none as soon as there are none."""
    deadline = time.monotonic() + limit_s
    while (found := survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def marked() -> Iterator[str]:
    """A mark for what the block starts; what carries it is killed in the end."""
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
            os.kill(pid, signal.SIGKILL)


def check_nothing_is_left(mark: str) -> None:
    """No process, and nobody has the CPU."""
    assert await_none(mark) == {}
    acquire(LockRequest((DeviceLock(CPU),)), 0.0).release()


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
