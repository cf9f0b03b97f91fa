# SPDX-License-Identifier: Apache-2.0
"""Locks between real processes: waiting, giving up, and what the kernel does for the dead."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from pytest_llenergy.devices.lease import Locks, lock_directory
from pytest_llenergy.errors import DeviceError

GPU = "GPU-a1b2c300-51d0-4c1f-9e70-0000005e11f0"

HOLD = """
import sys
from pytest_llenergy.devices.lease import Locks
print("ready", flush=True)
Locks().acquire(sys.argv[1:], 60)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(*devices: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that asks for the locks and keeps them until its input is closed or it is killed."""
    # Unbuffered, so that select sees every line that was not yet read.
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    with process:
        try:
            assert said(process) == "ready"
            yield process
        finally:
            process.kill()


def output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def said(process: subprocess.Popen[bytes]) -> str:
    return output(process).readline().decode().strip()


def silent_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    return not select.select([output(process)], [], [], seconds)[0]


def test_a_second_process_waits_and_a_killed_holder_frees() -> None:
    with holder(GPU) as first:
        assert said(first) == "held"
        with holder(GPU) as second:
            assert silent_for(second, 0.4)
            first.kill()
            assert said(second) == "held"


def test_giving_up_names_the_device_and_the_process() -> None:
    with holder(GPU) as process:
        assert said(process) == "held"
        start_s = time.monotonic()
        with pytest.raises(DeviceError) as caught:
            Locks().acquire([GPU], 0.2)
        assert time.monotonic() - start_s >= 0.2
    assert str(caught.value) == (
        f"{GPU} is still in use by process {process.pid}; wait for it, or raise --energy-lease-timeout"
    )


def test_other_devices_are_free() -> None:
    with holder(GPU) as process:
        assert said(process) == "held"
        locks = Locks()
        locks.acquire(["cpu", f"{GPU}1"], 0)
        locks.release()


def test_all_or_none() -> None:
    first, second, third = Locks(), Locks(), Locks()
    first.acquire(["b"], 0)
    with pytest.raises(DeviceError, match=r"^b is still in use"):
        second.acquire(["a", "b"], 0)
    third.acquire(["a"], 0)
    third.release()
    first.release()


def test_a_device_named_twice_is_locked_once_and_released() -> None:
    first, second = Locks(), Locks()
    first.acquire(["cpu", "cpu"], 0)
    with pytest.raises(DeviceError):
        second.acquire(["cpu"], 0)
    first.release()
    second.acquire(["cpu"], 0)
    second.release()
    second.release()


def test_locks_taken_in_opposite_orders_do_not_block_each_other() -> None:
    with holder("b", "a") as first, holder("a", "b") as second:
        fastest = select.select([output(first), output(second)], [], [], 30)[0]
        winner, loser = (first, second) if output(first) in fastest else (second, first)
        assert said(winner) == "held"
        winner.kill()
        assert said(loser) == "held"


def test_the_default_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLENERGY_LOCK_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = lock_directory()
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match=rf"^lock directory {directory} is not ours; set LLENERGY_LOCK_DIR"):
        lock_directory()


@pytest.mark.parametrize("name", ["missing/locks", "file"])
def test_a_directory_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLENERGY_LOCK_DIR", str(tmp_path / name))
    with pytest.raises(DeviceError, match=rf"^lock directory {tmp_path / name}: .*; set LLENERGY_LOCK_DIR"):
        lock_directory()
