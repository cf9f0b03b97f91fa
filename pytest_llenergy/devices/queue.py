# SPDX-License-Identifier: Apache-2.0
"""The queue for devices: tickets, whose turn it is, who holds what."""

from __future__ import annotations

import fcntl
import os
import random
import re
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest, any_conflict
from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.lockfiles import FILE_MODE
from pytest_llenergy.devices.timeouts import PATIENCE_S, SUSPENDED_AFTER_S, TICKET_CREATION_LIMIT_S

# Tickets: who waits for devices and who has them, in the order in which they came.
#
# A ticket is a file in the lock directory that its maker keeps locked for as long as it waits and holds. One
# that is not locked is dead, whatever it says. What a ticket says decides who goes first and what messages
# tell; who has a device is decided by the device's own lock.
#
# The state is in the name, so that a change of it is one ``rename`` and a look at the queue one listing:
# ``new`` (being made), ``waiting`` (may be passed, see ``turns``), ``firm`` (may not), ``holding``.

TicketState = Literal["new", "waiting", "firm", "holding"]

TICKET_NAME = re.compile(rf"{FILE_PREFIX}(new|waiting|firm|holding)-((\d{{20}})-[0-9a-f]{{16}})$")

#: Nobody writes as much; what is longer is not read.
MAX_TICKET_BYTES = 1 << 18


class TicketContent(msgspec.Struct, frozen=True):
    """What a ticket says. ``since_s`` is a wall clock's time, and ``namespace`` that of the process id.

    ``left`` are the devices that processes, which a test had started, still hold after its end.
    """

    pid: int
    namespace: str
    test: str
    since_s: float
    request: LockRequest
    holds: tuple[DeviceLock, ...] = ()
    left: bool = False


@dataclass(frozen=True)
class QueueEntry:
    """A living ticket. ``uid`` and ``beat_s`` (when it last gave a sign of life) come from the kernel."""

    state: TicketState
    order: str
    uid: int
    beat_s: float
    content: TicketContent

    @property
    def holds(self) -> tuple[DeviceLock, ...]:
        """What is held. The CPU is its maker's own and ends with it, whatever it has left running."""
        if not self.is_left:
            return self.content.holds
        return tuple(claim for claim in self.content.holds if claim.device != CPU)

    @property
    def is_left(self) -> bool:
        """Whether it is held by what its maker has left running, as far as this can be told from here."""
        content = self.content
        return content.left or (content.namespace == pid_namespace() and not _process_exists(content.pid))

    @property
    def waited_s(self) -> float:
        """How long ago it was made, in seconds."""
        return (time.monotonic_ns() - int(self.order.partition("-")[0])) / 1e9


class Ticket:
    """Our own. Raises ``OSError`` when it cannot be written."""

    def __init__(self, directory: LockDirectory, request: LockRequest, test: str) -> None:
        self.order: str = f"{time.monotonic_ns():020d}-{os.urandom(8).hex()}"
        self._directory = directory
        self._state: TicketState = "new"
        self._content = TicketContent(os.getpid(), pid_namespace(), test, time.time(), request)
        self.descriptor: int = self._make()

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{FILE_PREFIX}{self._state}-{self.order}"

    @property
    def request(self) -> LockRequest:
        """What is wanted."""
        return self._content.request

    @property
    def test(self) -> str:
        """What others are told of us."""
        return self._content.test

    def become(self, state: TicketState) -> None:
        """Change the state that others see."""
        old, self._state = self.name, state
        try:
            there = self._directory.descriptor
            os.rename(old, self.name, src_dir_fd=there, dst_dir_fd=there)
        except FileNotFoundError:
            # Somebody cleaned the directory; nobody sees the old one.
            os.close(self.descriptor)
            self.descriptor = self._make()

    def hold(self, claims: tuple[DeviceLock, ...]) -> None:
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

    def _make(self) -> int:
        descriptor = os.open(
            self.name,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            FILE_MODE,
            dir_fd=self._directory.descriptor,
        )
        try:
            os.fchmod(descriptor, FILE_MODE)
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


def list_entries(directory: LockDirectory, states: Iterable[TicketState], but: str = "") -> list[QueueEntry]:
    """The living tickets in these states, first come first, without the one whose order is ``but``.

    Dead ones are removed where they are ours.
    """
    wanted = set(states)
    found = []
    for name in os.listdir(directory.descriptor):  # noqa: PTH208 - by descriptor
        match = TICKET_NAME.fullmatch(name)
        if match is None or match[2] == but:
            continue
        if match[1] in wanted or (match[1] == "new" and _is_old(int(match[3]))):
            seen = read_entry(directory, name)
            if seen is not None and seen.state in wanted:
                found.append(seen)
    return sorted(found, key=lambda seen: seen.order)


def read_entry(directory: LockDirectory, name: str) -> QueueEntry | None:
    """The ticket of that name; ``None`` for one that is dead, gone, or none that we would write."""
    match = TICKET_NAME.fullmatch(name)
    try:
        descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
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
            content = msgspec.json.decode(os.pread(descriptor, MAX_TICKET_BYTES, 0), type=TicketContent)
            return QueueEntry(cast(TicketState, match[1]), match[2], state.st_uid, state.st_mtime, content)
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


def _process_exists(pid: int) -> bool:
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
    return not 0 <= time.monotonic_ns() - made_ns <= TICKET_CREATION_LIMIT_S * 1e9


# Whose turn it is: first come, first served, where it matters.
#
# A request waits for an earlier one if both want the same device and the earlier one could be served now, or
# has been passed often enough. An earlier one that waits for devices still in use may be passed by those that
# can do with what is free meanwhile: otherwise boards would idle while a test that needs all of them waits
# for the last. After ``PASSES`` of these it is firm: nobody passes any more, so that no request starves.

#: How many later requests may go before an earlier one that they conflict with: about one a board.
MAX_PASSES = 8

#: One look in so many also removes dead tickets that nobody is looking at.
CLEANUP_ONE_IN = 16


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue at one moment, as one of those who wait sees it: who is ahead, and who has what."""

    ahead: tuple[QueueEntry, ...] = ()
    holding: tuple[QueueEntry, ...] = ()

    def blocked(self, claims: tuple[DeviceLock, ...]) -> bool:
        """Whether these must be left to somebody who came earlier.

        What is in use at this moment may be free in the next; then it is for those who waited for it.
        """
        rivals = [
            seen for seen in self.ahead if not is_suspended(seen) and seen.content.request.wants(claims)
        ]
        if not rivals:
            return False
        return any_conflict(claims, locks_held(self.holding)) or any(
            seen.state == "firm" or is_servable(seen, self.holding) for seen in rivals
        )


def is_suspended(seen: QueueEntry) -> bool:
    """Whether its maker has given no sign of life for too long."""
    return time.time() - seen.beat_s > SUSPENDED_AFTER_S


def locks_held(holding: Sequence[QueueEntry]) -> list[DeviceLock]:
    """What these tickets say that they hold."""
    return [claim for holder in holding for claim in holder.holds]


def is_servable(seen: QueueEntry, holding: Sequence[QueueEntry]) -> bool:
    """Whether what somebody waits for is free, as far as the tickets tell."""
    busy = locks_held(holding)
    return seen.content.request.fit(lambda claims: not any_conflict(claims, busy)) is not None


@dataclass
class QueuePlace:
    """Our own place in the queue."""

    directory: LockDirectory
    ticket: Ticket
    passed_by: set[str] = field(default_factory=set)
    began_s: float = field(default_factory=time.monotonic)

    def first_look(self) -> QueueSnapshot:
        """Before we are in the queue. Who holds what matters only where somebody waits."""
        if random.randrange(CLEANUP_ONE_IN) == 0:
            list_entries(self.directory, ("holding",), self.ticket.order)
        ahead = list_entries(self.directory, ("waiting", "firm"), self.ticket.order)
        return self.look() if ahead else QueueSnapshot()

    def look(self) -> QueueSnapshot:
        """While we wait: note who has passed us, and let nobody pass after too many."""
        seen = list_entries(self.directory, ("waiting", "firm", "holding"), self.ticket.order)
        ahead = tuple(each for each in seen if each.state != "holding" and each.order < self.ticket.order)
        holding = tuple(each for each in seen if each.state == "holding")
        self.passed_by.update(
            each.order
            for each in holding
            if each.order > self.ticket.order and self.ticket.request.wants(each.holds)
        )
        return QueueSnapshot(ahead, holding)

    @property
    def out_of_patience(self) -> bool:
        """Whether enough have passed."""
        return len(self.passed_by) >= MAX_PASSES or time.monotonic() - self.began_s > PATIENCE_S


def is_awaited(directory: LockDirectory, claims: tuple[DeviceLock, ...], least_s: float = 0.0) -> bool:
    """Whether somebody waits for one of these, since ``least_s`` seconds, and has to."""
    queue = [
        seen
        for seen in list_entries(directory, ("waiting", "firm"))
        if seen.waited_s >= least_s and not is_suspended(seen) and seen.content.request.wants(claims)
    ]
    if not queue:
        return False
    holding = list_entries(directory, ("holding",))
    return any(not is_servable(seen, holding) for seen in queue)


# Who has the devices, told to people.

#: A test's name in another user's ticket is cut there.
MAX_TEST_NAME = 200

UNIDENTIFIED = "a process that says nothing of itself"

ADVICE = "wait for it, or raise --energy-lease-timeout"


def timeout_message(
    request: LockRequest, seconds: float, scene: QueueSnapshot, refused: Collection[DeviceLock] = ()
) -> str:
    """One line: what was wanted, everybody who has some of it, everybody who came earlier, what to do.

    ``refused`` is what others had locked; its holders may have no ticket.
    """
    return f"gpus: waited {seconds:g} s for {_describe_request(request)}: {_describe_obstacles(request, scene, refused)}; {ADVICE}"


def wait_message(request: LockRequest, scene: QueueSnapshot, refused: Collection[DeviceLock] = ()) -> str:
    """The same while it waits, for who looks on."""
    return f"waiting for {_describe_request(request)}: {_describe_obstacles(request, scene, refused)}"


def _describe_request(request: LockRequest) -> str:
    wanted = ", ".join(request.devices)
    return f"{request.n} of {wanted}" if 0 < request.n < len(request.choices) else wanted


def _describe_obstacles(request: LockRequest, scene: QueueSnapshot, refused: Collection[DeviceLock]) -> str:
    claims = {claim for choice in (request.always, *request.choices) for claim in choice}
    told = []
    for seen in scene.holding:
        held = [claim.device for claim in seen.holds if any_conflict((claim,), claims)]
        if held:
            told.append(f"{_list_devices(held, request)}held by {describe_owner(seen)}")
    named = [claim for seen in scene.holding for claim in seen.holds]
    silent = [claim.device for claim in refused if not any_conflict((claim,), named)]
    if silent:
        told.append(f"{_list_devices(silent, request)}held by {UNIDENTIFIED}")
    told += [
        f"queued before: {describe_owner(seen)}" for seen in scene.ahead if seen.content.request.wants(claims)
    ]
    return "; ".join(told) or f"held by {UNIDENTIFIED}"


def describe_owner(seen: QueueEntry) -> str:
    """Process, user, since when, and the test, of one ticket."""
    content = seen.content
    elsewhere = content.namespace != pid_namespace()
    process = f"process {content.pid}" + (" of another container" if elsewhere else "")
    if seen.is_left:
        process = f"what {process} left running"
    test = _printable(content.test)
    return f"{process} of {_user_name(seen.uid)} since {_format_time(content.since_s)}" + (
        f" ({test})" if test else ""
    )


def nested_request_message(held: Collection[DeviceLock], request: LockRequest) -> str:
    """Why a process that has devices may not wait for others."""
    has = ", ".join(dict.fromkeys(claim.device for claim in held))
    return (
        f"gpus: this process already holds {has} and asks for {', '.join(request.devices)}; ask for all "
        "devices at once: who waits with devices in hand can be waited for"
    )


def _list_devices(devices: Collection[str], request: LockRequest) -> str:
    # A single device that was asked for need not be named twice.
    return "" if list(devices) == list(request.devices) else f"{', '.join(sorted(set(devices)))} "


def _printable(text: str) -> str:
    """What another user wrote, harmless to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_TEST_NAME])


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _format_time(wall_s: float) -> str:
    try:
        then = time.localtime(wall_s)
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def describe_entries(seen: Sequence[QueueEntry]) -> list[str]:
    """One line a ticket, for people who look at the whole queue.

    Without what is shared, such as the host among tests on GPUs: it reads as if others could not have it.
    """
    lines = []
    for each in seen:
        verb, devices = "held", [claim.device for claim in each.holds if not claim.shared]
        if each.state != "holding":
            verb, devices = "awaited", list(each.content.request.devices)
        if devices:
            lines.append(f"{', '.join(map(_printable, devices))} {verb} by {describe_owner(each)}")
    return lines
