# SPDX-License-Identifier: Apache-2.0
"""Tickets: the files by which processes that wait for devices, or hold them, know of each other.

A ticket is a file in the lock directory. Its maker keeps it locked while it waits for devices or holds them;
a ticket that is not locked is dead, whatever its content.

The state of a ticket is in its name, so that changing it is one ``rename`` and reading the queue starts with
one directory listing. The states are ``new`` (being created), ``waiting`` (others may pass it), ``firm``
(nobody may pass it) and ``holding``.

Other users write tickets too, and the directory may contain anything. Whatever is not a plausible ticket is
ignored.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest, Locks, any_conflict
from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.lockfiles import FILE_MODE
from pytest_llenergy.devices.timeouts import SUSPENDED_AFTER_S, TICKET_CREATION_LIMIT_S
from pytest_llenergy.record.base import MALFORMED

TicketState = Literal["new", "waiting", "firm", "holding"]

#: State, then the order: creation time on the monotonic clock (ns) and a random part.
TICKET_NAME = re.compile(rf"{FILE_PREFIX}(new|waiting|firm|holding)-(([0-9]{{20}})-[0-9a-f]{{16}})")

#: Larger than any ticket that this package writes. The rest of a longer file is not read.
MAX_TICKET_BYTES = 1 << 15

#: How many names are considered, and how many tickets of each user are read, the oldest first. A process has
#: one ticket per lease. Reading the queue stays a matter of milliseconds, whatever others put there.
MAX_TICKETS, MAX_TICKETS_PER_USER = 10_000, 128

#: Names of tests and devices are cut to this many characters.
MAX_NAME = 200

#: Owner and order of a ticket.
RequestKey = tuple[int, str]


class TicketContent(msgspec.Struct, frozen=True):
    """The content of a ticket.

    Attributes:
        pid: Process id of the maker, as numbered in ``namespace``.
        namespace: PID namespace of the maker.
        test: Node id of the test, for messages.
        since_s: When it started to wait or to hold (seconds since the epoch).
        request: The locks that it requests.
        holds: The locks that it holds.
        left: Whether ``holds`` is held only by processes that outlived the test.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    namespace: str
    test: str
    since_s: float
    request: LockRequest
    holds: Locks = ()
    left: bool = False


@dataclass(frozen=True)
class QueueEntry:
    """A living ticket as other processes read it.

    ``uid`` is its owner and ``refreshed_s`` its modification time (seconds since the epoch), both from the
    kernel.
    """

    state: TicketState
    order: str
    uid: int
    refreshed_s: float
    content: TicketContent

    @property
    def key(self) -> RequestKey:
        """Identifies the request. Another user may copy the order of a ticket."""
        return self.uid, self.order

    @property
    def holds(self) -> tuple[DeviceLock, ...]:
        """The locks that are held. The CPU is free once its holder ends, even if its processes still run."""
        if not self.is_left:
            return self.content.holds
        return tuple(lock for lock in self.content.holds if lock.device != CPU)

    @property
    def is_left(self) -> bool:
        """Whether the locks are held only by processes that the maker left running, as far as visible."""
        return self.content.left or self.is_orphaned

    @property
    def is_orphaned(self) -> bool:
        """Whether the maker does not exist, as far as visible."""
        content = self.content
        return content.namespace == pid_namespace() and not _process_exists(content.pid)

    @property
    def age_s(self) -> float:
        """Seconds since the ticket was created."""
        return (time.monotonic_ns() - int(self.order.partition("-")[0])) / 1e9

    @cached_property
    def is_suspended(self) -> bool:
        """Whether a waiting maker is gone or has not refreshed the ticket for too long."""
        # A time in the future would keep a ticket fresh for ever.
        return self.is_orphaned or abs(time.time() - self.refreshed_s) > SUSPENDED_AFTER_S

    @cached_property
    def _wanted(self) -> set[DeviceLock]:
        return self.content.request.all_locks

    def wants(self, locks: Iterable[DeviceLock]) -> bool:
        """Return whether the request may take a lock that conflicts with one of these."""
        return any_conflict(locks, self._wanted)

    def is_servable(self, busy: Sequence[DeviceLock]) -> bool:
        """Return whether everything that the entry waits for is free while others hold ``busy``."""
        return self.content.request.select(lambda locks: not any_conflict(locks, busy)) is not None


class Ticket:
    """The ticket of this process. Every method raises ``OSError`` if the file cannot be written."""

    def __init__(self, directory: LockDirectory, request: LockRequest, test: str) -> None:
        self.order: str = _next_order()
        self._directory = directory
        self._state: TicketState = "new"
        self._content = TicketContent(os.getpid(), pid_namespace(), printable(test), time.time(), request)
        self.descriptor: int = self._create()

    @property
    def name(self) -> str:
        """File name."""
        return f"{FILE_PREFIX}{self._state}-{self.order}"

    @property
    def request(self) -> LockRequest:
        """The locks that are requested."""
        return self._content.request

    @property
    def test(self) -> str:
        """The name of the test that other processes show."""
        return self._content.test

    def set_state(self, state: TicketState) -> None:
        """Change the state that others see."""
        old, self._state = self.name, state
        try:
            parent = self._directory.descriptor
            os.rename(old, self.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            # The file was removed, or another user has taken its new name.
            os.close(self.descriptor)
            self.descriptor = self._create()

    def hold(self, locks: tuple[DeviceLock, ...]) -> None:
        """Record the locks that are held from now on."""
        self._content = msgspec.structs.replace(self._content, holds=locks, since_s=time.time())
        self._write(self.descriptor)
        if self._state != "holding":
            self.set_state("holding")

    def set_test(self, test: str) -> None:
        """Record which test holds the devices from now on."""
        self._content = msgspec.structs.replace(self._content, test=printable(test), since_s=time.time())
        self._write(self.descriptor)

    def refresh(self) -> None:
        """Show that this process still runs, since a suspended process must not block others."""
        os.utime(self.descriptor)

    def close(self, *, lent: bool = False) -> None:
        """Remove the ticket. A ``lent`` ticket that other processes keep locked is marked as left."""
        if lent:
            os.close(self.descriptor)
            if read_entry(self._directory, self.name) is not None:
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

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.name, flags, FILE_MODE, dir_fd=self._directory.descriptor)
        except FileExistsError:
            self.order = _next_order()
            return self._create()
        try:
            os.fchmod(descriptor, FILE_MODE)
            # If somebody else has already locked it, others take the ticket for alive all the same.
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _next_order() -> str:
    return f"{time.monotonic_ns():020d}-{os.urandom(8).hex()}"


def list_entries(
    directory: LockDirectory, states: Iterable[TicketState], exclude: str = ""
) -> list[QueueEntry]:
    """Return the living tickets in these states, the oldest first, and remove dead ones where permitted.

    Args:
        directory: The lock directory.
        states: Which tickets to read.
        exclude: ``order`` of a ticket to leave out.
    """
    wanted = set(states)
    entries = []
    names = os.listdir(directory.descriptor)  # noqa: PTH208 - by descriptor
    tickets = [*islice(filter(None, map(TICKET_NAME.fullmatch, names)), MAX_TICKETS)]
    counts = Counter[int]()
    for match in sorted(tickets, key=lambda match: match[2]):
        if match[2] == exclude or not (
            match[1] in wanted or (match[1] == "new" and _is_abandoned(int(match[3])))
        ):
            continue
        with suppress(OSError):
            owner = os.stat(match[0], dir_fd=directory.descriptor, follow_symlinks=False).st_uid
            counts[owner] += 1
            if counts[owner] > MAX_TICKETS_PER_USER:
                continue
            entry = read_entry(directory, match[0])
            if entry is not None and entry.state in wanted:
                entries.append(entry)
    return entries


def read_entry(directory: LockDirectory, name: str) -> QueueEntry | None:
    """Read one ticket. Returns None for one that is dead, gone, or not written by this package."""
    match = TICKET_NAME.fullmatch(name)
    try:
        descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        # A second name would be a copy of another user's ticket in another place of the queue.
        if match is None or not stat.S_ISREG(state.st_mode) or state.st_nlink > 1 or state.st_mode & 0o022:
            return None
        try:
            # A shared lock, so that two readers of a dead ticket do not mistake each other for its maker.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            content = msgspec.json.decode(os.pread(descriptor, MAX_TICKET_BYTES, 0), type=TicketContent)
            return QueueEntry(cast(TicketState, match[1]), match[2], state.st_uid, state.st_mtime, content)
        # In a sticky directory the kernel refuses this for tickets of other users.
        with suppress(OSError):
            os.unlink(name, dir_fd=directory.descriptor)
        return None
    except MALFORMED:
        # Half written, or not a ticket: nobody has to wait for it.
        return None
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1)
def pid_namespace() -> str:
    """Return the namespace in which our process id is valid; empty if the system does not report it."""
    try:
        return Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return ""


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_abandoned(created_ns: int) -> bool:
    # The monotonic clock restarts with the system, so a time in the future is from before a restart.
    return not 0 <= time.monotonic_ns() - created_ns <= TICKET_CREATION_LIMIT_S * 1e9


def printable(text: str) -> str:
    """Make text that another user wrote harmless to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_NAME])
