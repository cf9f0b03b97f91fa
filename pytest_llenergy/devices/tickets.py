# SPDX-License-Identifier: Apache-2.0
"""Tickets: who waits for devices and who has them, in the order in which they came.

A ticket is a file in the lock directory that its maker keeps locked for as long as it waits and holds. One
that is not locked is dead, whatever it says. What a ticket says decides who goes first and what messages
tell; who has a device is decided by the device's own lock.

The state is in the name, so that a change of it is one ``rename`` and a look at the queue one listing:
``new`` (being made), ``waiting`` (may be passed, see ``turns``), ``firm`` (may not), ``holding``.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec

from pytest_llenergy.devices.claims import CPU, Claim, Request
from pytest_llenergy.devices.lockdir import PREFIX, READ, Directory
from pytest_llenergy.devices.lockfile import MODE

State = Literal["new", "waiting", "firm", "holding"]

NAME = re.compile(rf"{PREFIX}(new|waiting|firm|holding)-((\d{{20}})-[0-9a-f]{{16}})$")

#: Nobody writes as much; what is longer is not read.
MOST_BYTES = 1 << 18

#: A ticket that is being made for so long (seconds) belongs to somebody who died over it.
STILLBORN_S = 60.0


class Content(msgspec.Struct, frozen=True):
    """What a ticket says. ``since_s`` is a wall clock's time, and ``namespace`` that of the process id.

    ``left`` are the devices that processes, which a test had started, still hold after its end.
    """

    pid: int
    namespace: str
    test: str
    since_s: float
    request: Request
    holds: tuple[Claim, ...] = ()
    left: bool = False


@dataclass(frozen=True)
class Seen:
    """A living ticket. ``uid`` and ``beat_s`` (when it last gave a sign of life) come from the kernel."""

    state: State
    order: str
    uid: int
    beat_s: float
    content: Content

    @property
    def holds(self) -> tuple[Claim, ...]:
        """What is held. The CPU is its maker's own and ends with it, whatever it has left running."""
        if not self.is_left:
            return self.content.holds
        return tuple(claim for claim in self.content.holds if claim.device != CPU)

    @property
    def is_left(self) -> bool:
        """Whether it is held by what its maker has left running, as far as this can be told from here."""
        content = self.content
        return content.left or (content.namespace == pid_namespace() and not _exists(content.pid))

    @property
    def waited_s(self) -> float:
        """How long ago it was made, in seconds."""
        return (time.monotonic_ns() - int(self.order.partition("-")[0])) / 1e9


class Ticket:
    """Our own. Raises ``OSError`` when it cannot be written."""

    def __init__(self, directory: Directory, request: Request, test: str) -> None:
        self.order: str = f"{time.monotonic_ns():020d}-{os.urandom(8).hex()}"
        self._directory = directory
        self._state: State = "new"
        self._content = Content(os.getpid(), pid_namespace(), test, time.time(), request)
        self.descriptor: int = self._make()

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{PREFIX}{self._state}-{self.order}"

    @property
    def request(self) -> Request:
        """What is wanted."""
        return self._content.request

    @property
    def test(self) -> str:
        """What others are told of us."""
        return self._content.test

    def become(self, state: State) -> None:
        """Change the state that others see."""
        old, self._state = self.name, state
        try:
            there = self._directory.descriptor
            os.rename(old, self.name, src_dir_fd=there, dst_dir_fd=there)
        except FileNotFoundError:
            # Somebody cleaned the directory; nobody sees the old one.
            os.close(self.descriptor)
            self.descriptor = self._make()

    def hold(self, claims: tuple[Claim, ...]) -> None:
        """Say what is held from now on."""
        self._content = msgspec.structs.replace(self._content, holds=claims, since_s=time.time())
        self._write(self.descriptor)
        if self._state != "holding":
            self.become("holding")

    def tell(self, test: str) -> None:
        """Say whose the devices are from now on."""
        self._content = msgspec.structs.replace(self._content, test=test, since_s=time.time())
        self._write(self.descriptor)

    def beat(self) -> None:
        """Give a sign of life: who is stopped must not hold up the others."""
        os.utime(self.descriptor)

    def close(self, *, lent: bool = False) -> None:
        """Take it away. If it was ``lent`` to processes that are still there, it stays and says so."""
        if lent:
            os.close(self.descriptor)
            if read(self._directory, self.name) is not None:
                self._content = msgspec.structs.replace(self._content, left=True)
                with suppress(OSError):
                    descriptor = os.open(
                        self.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=self._directory.descriptor
                    )
                    self._write(descriptor)
                    os.close(descriptor)
            return
        with suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self._directory.descriptor)
        os.close(self.descriptor)

    def _make(self) -> int:
        descriptor = os.open(
            self.name,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            MODE,
            dir_fd=self._directory.descriptor,
        )
        try:
            os.fchmod(descriptor, MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._write(descriptor)
        except OSError:
            os.unlink(self.name, dir_fd=self._directory.descriptor)
            os.close(descriptor)
            raise
        return descriptor

    def _write(self, descriptor: int) -> None:
        data = msgspec.json.encode(self._content)
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))


def living(directory: Directory, states: Iterable[State], but: str = "") -> list[Seen]:
    """The living tickets in these states, first come first, without the one whose order is ``but``.

    Dead ones are removed where they are ours.
    """
    wanted = set(states)
    found = []
    for name in os.listdir(directory.descriptor):  # noqa: PTH208 - by descriptor
        match = NAME.fullmatch(name)
        if match is None or match[2] == but:
            continue
        if match[1] in wanted or (match[1] == "new" and _is_old(int(match[3]))):
            seen = read(directory, name)
            if seen is not None and seen.state in wanted:
                found.append(seen)
    return sorted(found, key=lambda seen: seen.order)


def read(directory: Directory, name: str) -> Seen | None:
    """The ticket of that name; ``None`` for one that is dead, gone, or none that we would write."""
    match = NAME.fullmatch(name)
    try:
        descriptor = os.open(name, READ | os.O_NONBLOCK, dir_fd=directory.descriptor)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        if match is None or not stat.S_ISREG(state.st_mode) or state.st_mode & 0o022:
            return None
        try:
            # Shared: who only looks must not make another one who looks believe that it lives.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            content = msgspec.json.decode(os.pread(descriptor, MOST_BYTES, 0), type=Content)
            return Seen(cast(State, match[1]), match[2], state.st_uid, state.st_mtime, content)
        if state.st_uid == os.geteuid():
            with suppress(OSError):
                os.unlink(name, dir_fd=directory.descriptor)
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        # It is being written, or it is nonsense; neither makes anybody wait.
        return None
    finally:
        os.close(descriptor)


def pid_namespace() -> str:
    """The namespace in which our process id means something; empty where the system does not tell."""
    try:
        return Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _is_old(made_ns: int) -> bool:
    # After a restart the clock begins anew, and what lies in the future is old.
    return not 0 <= time.monotonic_ns() - made_ns <= STILLBORN_S * 1e9
