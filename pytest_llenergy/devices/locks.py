# SPDX-License-Identifier: Apache-2.0
"""Lock devices, all or none, against every other process of the host.

Each device has two files in the lock directory, and the kernel's ``flock`` on them decides everything. Who
has locked *hold* has the device, until the last process with the open file is gone. Who has locked *queue* is
the next: nobody else may take the device, even if it is free.

A request first looks for free devices. If it finds too few for a moment, it locks the queue of every device
that it could use, in the order of their names, and keeps these locks until it is served. So a request for
many devices is not starved by those for one, no two requests wait for each other, and requests without a
common device never meet. The CPU, which all share that measure on GPUs, is taken last.

Each process that holds or queues has a file with one line, which is only shown.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import (
    FILE_PREFIX,
    LOCK_DIR_VARIABLE,
    READ_FLAGS,
    LockDirectory,
    open_lock_directory,
    user_name,
)
from pytest_llenergy.devices.timeouts import (
    POLL_FIRST_S,
    POLL_GROWTH,
    POLL_LONGEST_S,
    QUEUE_AFTER_S,
    WAIT_MESSAGE_EVERY_S,
    WAIT_MESSAGE_FIRST_S,
)
from pytest_llenergy.errors import DeviceError, LeaseTimeoutError
from pytest_llenergy.record.base import MALFORMED

#: Readable by all, whatever the umask, since others cannot lock a file that they cannot open.
FILE_MODE = 0o644

#: What is read of a line of others, and shown of the name of a test.
MAX_LINE_BYTES, MAX_NAME = 1 << 14, 200

HOLDER_SUFFIX = ".holder"

#: A lease is checked while the files of its test may be fake ones, which replace names, but no ``partial``.
_stat, _fstat = partial(os.stat), partial(os.fstat)


class _Line(msgspec.Struct, frozen=True):
    """What a process writes: its pid, the test, since when (seconds since the epoch), and its devices."""

    pid: int
    test: str
    since_s: float
    devices: list[str]
    shared: list[str]


class Held:
    """Devices held or queued for until ``release``, or until all processes with its descriptors have ended.

    While ``idle``, the devices serve no test, and must be released when another process queues for them.

    Attributes:
        directory: The lock directory, open as long as the lease.
        chosen: Indices of the choices of the request that were taken.
        idle: Whether no test uses the devices.
    """

    def __init__(self, directory: LockDirectory, test: str) -> None:
        self.directory = directory
        self.chosen: tuple[int, ...] = ()
        self.idle = False
        self._test = test
        self._locks: dict[DeviceLock, int] = {}
        self._queued: dict[DeviceLock, int] = {}
        self._name = f"{FILE_PREFIX}{os.urandom(8).hex()}{HOLDER_SUFFIX}"
        self._line: int | None = None
        _HELD.append(self)

    @property
    def locks(self) -> tuple[DeviceLock, ...]:
        """The locks that are held."""
        return tuple(self._locks)

    def take(self, request: LockRequest, pause: Callable[[], bool]) -> tuple[int, ...]:
        """Take all locks of a request, or none. Returns the indices of its choices.

        Args:
            request: The locks to take.
            pause: Waits for the next attempt, or raises. Returns whether it is time to queue.
        """
        taken: dict[DeviceLock, int] = {}
        try:
            while True:
                if self._try(request.always, taken):
                    chosen = request.select(lambda choice: self._try(choice, taken))
                    if chosen is not None:
                        self._locks |= {lock: taken.pop(lock) for lock in request.locks_of(chosen)}
                        _close(self._queued)
                        self._write_line()
                        return chosen
                _close(taken)
                if pause():
                    self._queue_up(request)
        finally:
            _close(taken)

    def _try(self, wanted: Iterable[DeviceLock], taken: dict[DeviceLock, int]) -> bool:
        """Add locks to ``taken`` if all are free, and nobody else queues for one."""
        missing = [lock for lock in wanted if lock not in taken]
        for lock in missing:
            descriptor = _lock(self.directory, lock_name(lock.device), shared=lock.shared)
            if descriptor is not None:
                taken[lock] = descriptor
            if descriptor is None or not (lock in self._queued or _is_unqueued(self.directory, lock)):
                _close(taken, [each for each in missing if each in taken])
                return False
        return True

    def _queue_up(self, request: LockRequest) -> None:
        """Lock the queues of all devices in the order of their names, up to the first that another has."""
        before = len(self._queued)
        for lock in sorted(request.all_locks - self._queued.keys()):
            descriptor = _lock(self.directory, _queue_name(lock.device), shared=lock.shared)
            if descriptor is None:
                break
            self._queued[lock] = descriptor
        if len(self._queued) > before:
            self._write_line()

    def lend_descriptors(self) -> tuple[int, ...]:
        """Return descriptors for processes that use the GPUs. The lease lasts while any of them is open.

        End these processes before ``release``; a process left running keeps its GPUs locked. The lock of the
        CPU is never lent: a process left running would block every test of the host, including tests on
        GPUs.
        """
        gpus = [descriptor for lock, descriptor in self._locks.items() if lock.device != CPU]
        return () if not gpus or self._line is None else (*gpus, self._line)

    def intact(self) -> bool:
        """Return whether the lock files still exist. A removed file does not exclude other processes."""
        try:
            named = [_stat(lock_name(lock.device), dir_fd=self.directory.descriptor) for lock in self._locks]
        except OSError:
            return False
        return all(map(os.path.samestat, named, map(_fstat, self._locks.values())))

    def is_wanted(self) -> bool:
        """Return whether another process queues for one of the GPUs."""
        gpus = (lock for lock in self._locks if lock.device != CPU and not lock.shared)
        return not all(_is_unqueued(self.directory, lock) for lock in gpus)

    def describe_others(self, request: LockRequest) -> str:
        """Return what a request needs, and who holds it or queues for it."""
        any_mode = {lock.device for lock in request.all_locks}
        exclusive = {lock.device for lock in request.all_locks if not lock.shared}
        parts = []
        for line, owner in _list_lines(self.directory, without=self._name):
            if found := {*line.devices} & any_mode | {*line.shared} & exclusive:
                # The message has already named what was requested.
                which = "" if found == {*request.devices} else f"{', '.join(sorted(found))} "
                parts.append(f"{which}held by {owner}")
        wanted = f"{request.n} of " if 0 < request.n < len(request.choices) else ""
        return f"{wanted}{', '.join(request.devices)}: {'; '.join(parts) or 'held by an unknown process'}"

    def assign_to(self, test: str) -> None:
        """Use the devices for this test from now on, and show its name to others."""
        self._test, self.idle = test, False
        self._write_line()

    def mark_idle(self) -> None:
        """Show that no test uses the devices, on which ranks wait for the next test."""
        self.idle = True
        self._write_line()

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Release all locks except the wanted ones."""
        _close(self._locks, [lock for lock in self._locks if lock not in wanted])
        self._write_line()

    def release(self) -> None:
        """Release everything. May be called again."""
        if self not in _HELD:
            return
        _HELD.remove(self)
        _close(self._queued)
        self.keep_only(())
        if self._line is not None:
            os.close(self._line)
            # Unless a process that was left running still holds it.
            _read_line(self.directory, self._name)
        self.directory.close()

    def close_inherited(self) -> None:
        """Close what a forked child inherited: it does not use the devices, and must not keep them."""
        for locks in (self._locks, self._queued):
            _close(locks)
        if self._line is not None:
            os.close(self._line)
        self.directory.close()

    def _write_line(self) -> None:
        every = {**self._locks, **self._queued}
        if not every:
            return
        if self._line is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._line = os.open(self._name, flags, FILE_MODE, dir_fd=self.directory.descriptor)
            os.fchmod(self._line, FILE_MODE)
            fcntl.flock(self._line, fcntl.LOCK_EX)
        devices = sorted(lock.device for lock in every if not lock.shared)
        # Who only queues excludes nobody who shares.
        shared = sorted(lock.device for lock in self._locks if lock.shared)
        test = _printable(f"idle ranks of {self._test}" if self.idle else self._test)
        line = msgspec.json.encode(_Line(os.getpid(), test, time.time(), devices, shared))
        # For messages only, so a full disk must not fail the test.
        with suppress(OSError):
            os.pwrite(self._line, line + b"\n", 0)
            os.ftruncate(self._line, len(line) + 1)


#: The leases of this process, which must not wait for itself. The fork handler cannot be removed.
_HELD: list[Held] = []


def _close_inherited() -> None:
    for held in _HELD:
        held.close_inherited()
    _HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)


def ignore_message(message: str) -> None:
    """Drop the messages of a wait that nobody watches."""


def acquire(
    request: LockRequest,
    wait_s: float,
    test: str = "",
    open_directory: Callable[[], LockDirectory] = open_lock_directory,
    on_wait: Callable[[str], None] = ignore_message,
) -> Held:
    """Lock the devices of a request, all or none, and wait for them.

    Args:
        request: The locks to take.
        wait_s: How long to wait at most (seconds).
        test: What messages in other processes call the holder.
        open_directory: Opens the lock directory.
        on_wait: Called every few seconds of the wait with one line that names the holders.

    Raises:
        DeviceError: The wait timed out (the message names all holders), this process uses other devices
            already, or there is no lock directory.
    """
    in_use = [lock.device for held in _HELD if not held.idle for lock in held.locks]
    if in_use:
        raise DeviceError(
            f"gpus: this process already holds {', '.join(in_use)} and requests "
            f"{', '.join(request.devices)}; run a pytest inside a test in a process of its own"
        )
    held = Held(open_directory(), test)
    pauses = _wait(held, request, wait_s, on_wait)
    gpus = tuple(lock for lock in request.always if lock.device != CPU)
    host = tuple(lock for lock in request.always if lock.device == CPU)
    try:
        held.chosen = held.take(replace(request, always=gpus), partial(next, pauses))
        if host:
            held.take(LockRequest(host), partial(next, pauses))
    except OSError as error:
        held.release()
        raise DeviceError(
            f"gpus: no lease can be taken in {held.directory.path}: {error}; set {LOCK_DIR_VARIABLE} to "
            "another directory"
        ) from None
    except BaseException:
        held.release()
        raise
    return held


def _wait(held: Held, request: LockRequest, wait_s: float, on_wait: Callable[[str], None]) -> Iterator[bool]:
    """Wait for the next attempt at each step. Yields whether it is time to queue.

    Raises:
        LeaseTimeoutError: The time is over.
    """
    start_s, pause_s, message_s = real_time.monotonic(), POLL_FIRST_S, WAIT_MESSAGE_FIRST_S
    while (waited_s := real_time.monotonic() - start_s) < wait_s:
        if waited_s > message_s:
            on_wait(f"waiting for {held.describe_others(request)}")
            message_s = waited_s + WAIT_MESSAGE_EVERY_S
        real_time.sleep(min(pause_s, wait_s - waited_s))
        pause_s = min(pause_s * POLL_GROWTH, POLL_LONGEST_S)
        yield real_time.monotonic() - start_s > QUEUE_AFTER_S
    # Who starts a pytest that does not wait may itself hold what it needs.
    nested = "a pytest within a test does not wait; give it other GPUs (--energy-gpus)"
    advice = "wait for it, or raise --energy-lease-timeout" if wait_s else nested
    raise LeaseTimeoutError(f"gpus: waited {wait_s:g} s for {held.describe_others(request)}; {advice}")


def _is_unqueued(directory: LockDirectory, lock: DeviceLock) -> bool:
    """Return whether nobody queues who excludes this lock."""
    descriptor = _lock(directory, _queue_name(lock.device), shared=lock.shared)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _lock(directory: LockDirectory, name: str, *, shared: bool) -> int | None:
    """Lock a file, which is created if it is missing. Returns None if another process has locked it.

    It is opened for reading only, so that every user can lock a file that another user has created. O_CREAT,
    which the kernel may refuse for a file of others, is the second attempt.
    """
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory.descriptor)
    except FileNotFoundError:
        with suppress(FileExistsError):
            flags = READ_FLAGS | os.O_CREAT | os.O_EXCL
            made = os.open(name, flags, FILE_MODE, dir_fd=directory.descriptor)
            os.fchmod(made, FILE_MODE)
            os.close(made)
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory.descriptor)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _close(locks: dict[DeviceLock, int], which: Collection[DeviceLock] | None = None) -> None:
    """Let go of some locks, or of all."""
    for lock in [*locks] if which is None else which:
        os.close(locks.pop(lock))


def lock_name(device: str) -> str:
    """Return the name of the file that the holder of a device locks."""
    return f"{FILE_PREFIX}{hash_name(device)}.lock"


def _queue_name(device: str) -> str:
    return f"{FILE_PREFIX}{hash_name(device)}.queue.lock"


def hash_name(device: str) -> str:
    """Return a name for a device that fits into that of a file."""
    return hashlib.sha256(device.encode()).hexdigest()[:16]


def is_held(directory: LockDirectory, device: str) -> bool:
    """Return whether a process holds a device."""
    descriptor = _lock(directory, lock_name(device), shared=True)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def describe_leases(directory: LockDirectory) -> list[str]:
    """Return one line for each process that holds exclusive devices or queues for some."""
    lines = _list_lines(directory)
    return [
        f"{', '.join(map(_printable, line.devices))} held by {who}" for line, who in lines if line.devices
    ]


def _list_lines(directory: LockDirectory, without: str = "") -> list[tuple[_Line, str]]:
    """Return the lines of all living processes, each with a description of the process."""
    names = sorted(os.listdir(directory.descriptor))  # noqa: PTH208 - by descriptor
    found = [
        _read_line(directory, name)
        for name in names
        if name.startswith(FILE_PREFIX) and name.endswith(HOLDER_SUFFIX) and name != without
    ]
    return [each for each in found if each is not None]


def _read_line(directory: LockDirectory, name: str) -> tuple[_Line, str] | None:
    """Read the line of a holder; remove that of a dead one, if this user may."""
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory.descriptor)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # An unreadable line is one that is just being written, or that somebody else has made up.
        with suppress(*MALFORMED, OSError, OverflowError):
            line = msgspec.json.decode(os.pread(descriptor, MAX_LINE_BYTES, 0), type=_Line)
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.since_s))
            test = f" ({_printable(line.test)})" if line.test else ""
            return line, f"process {line.pid} of {user_name(os.fstat(descriptor).st_uid)} since {when}{test}"
    else:
        # An empty one is just being made.
        with suppress(OSError):
            if os.fstat(descriptor).st_size:
                os.unlink(name, dir_fd=directory.descriptor)
    finally:
        os.close(descriptor)
    return None


def _printable(text: str) -> str:
    """Make text that another user wrote harmless to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_NAME])
