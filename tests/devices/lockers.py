# SPDX-License-Identifier: Apache-2.0
"""Real processes that take leases when they are told to, each under a user id of its own if need be."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

#: Takes its user id only after all is imported: others need not be able to read this checkout. What it makes
#: is for its own user only, as far as its umask goes.
SCRIPT = """
import json, os, subprocess, sys
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.errors import DeviceError

def locks(given):
    return tuple(DeviceLock(*each) if isinstance(each, list) else DeviceLock(each) for each in given)

uid = int(sys.argv[1])
if uid != os.getuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
os.umask(0o077)
held = []
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    told = json.loads(line)
    if told == "release":
        held.pop().release()
        print(json.dumps("released"), flush=True)
        continue
    if told == "lend":
        child = subprocess.Popen(["sleep", "600"], pass_fds=held[-1].lend_descriptors())
        print(json.dumps(child.pid), flush=True)
        continue
    choices = tuple(locks([choice]) for choice in told["choices"])
    request = LockRequest(locks(told["always"]), told["n"], choices)
    try:
        held.append(acquire(request, told["wait_s"], told["test"]))
        print(json.dumps({"held": sorted(lock.device for lock in held[-1].locks)}), flush=True)
    except DeviceError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""

#: Three users that need not exist.
USERS = (65534, 1001, 1002)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for several users")


class Locker:
    """A process that asks for devices."""

    def __init__(self, uid: int | None = None) -> None:
        # Unbuffered, so that select sees every line that was not yet read.
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(os.getuid() if uid is None else uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(
        self,
        *always: str | tuple[str, bool],
        n: int = 0,
        of: Sequence[str] = (),
        wait_s: float = 60.0,
        test: str = "",
    ) -> None:
        """Ask for these, and ``n`` of others. A pair is a device and whether it is shared."""
        self._say({"always": always, "n": n, "choices": of, "wait_s": wait_s, "test": test})

    def take(self, *always: str | tuple[str, bool], **kwargs: Any) -> list[str]:
        """Ask, and wait until it has what it asked for."""
        self.ask(*always, **kwargs)
        answer = self.answer()
        assert isinstance(answer, dict)
        assert "held" in answer, answer
        held: list[str] = answer["held"]
        return held

    def refused(self, *always: str | tuple[str, bool], **kwargs: Any) -> str:
        """Ask, by default without patience, and return the error."""
        self.ask(*always, **{"wait_s": 0.0, **kwargs})
        answer = self.answer()
        assert isinstance(answer, dict)
        return str(answer["error"])

    def release(self) -> None:
        self._say("release")
        assert self.answer() == "released"

    def lend(self) -> int:
        """Start a process that uses its devices. Returns its pid."""
        self._say("lend")
        return int(self.answer())

    def answer(self, seconds: float = 60.0) -> Any:
        assert not self.is_silent_for(seconds), "no answer"
        return json.loads(self._output.readline())

    def is_silent_for(self, seconds: float) -> bool:
        return not select.select([self._output], [], [], seconds)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")

    @property
    def _output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


MakeLocker = Callable[..., Locker]


@contextmanager
def lockers() -> Iterator[MakeLocker]:
    """Makes lockers, and ends them."""
    made: list[Locker] = []

    def make(uid: int | None = None) -> Locker:
        made.append(Locker(uid))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            with each.process:
                each.process.kill()


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory like /tmp, which unlike pytest's own can be reached by every user."""
    path = Path(tempfile.mkdtemp(prefix="llenergy-test-"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "never came true"
        # Another process makes it true; nothing tells when.
        time.sleep(0.005)
