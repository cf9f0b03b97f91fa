# SPDX-License-Identifier: Apache-2.0
"""Lock devices, all or none, against every other process of the host.

Each device has two files in the lock directory, and the kernel's ``flock`` on them decides everything. Who
has locked *hold* has the device, until the last process with the open file is gone. Who has locked *queue* is
the next: nobody else may take the device, even if it is free.

A request first looks for free devices. If it finds too few for a moment, it locks the queue of every device
that it could use, in the order of their names, and keeps these locks until it is served. So a request for
many devices is not starved by those for one, no two requests wait for each other, and requests without a
common device never meet. The CPU, which all share that measure on GPUs, is taken last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pytest_llenergy import real_time
from pytest_llenergy.devices.holders import HolderFile, list_holders
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import (
    FILE_PREFIX,
    LOCK_DIR_VARIABLE,
    READ_FLAGS,
    LockDirectory,
    open_lock_directory,
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


class Held:
    """Devices held or queued for until ``release``, or until all processes with its descriptors have ended.

    Attributes:
        directory: The lock directory, open as long as the lease.
        chosen: Indices of the choices of the request that were taken.
    """

    def __init__(self, directory: LockDirectory, test: str) -> None:
        self.directory = directory
        self.chosen: tuple[int, ...] = ()
        self._test = test
        self._locks: dict[DeviceLock, int] = {}
        self._queued: dict[DeviceLock, int] = {}
        self._file = HolderFile(directory)
        self._write_line()
        _HELD.add(self)

    @property
    def locks(self) -> tuple[DeviceLock, ...]:
        """The locks that are held."""
        return tuple(self._locks)

    def take(self, request: LockRequest, pauses: Iterator[bool]) -> tuple[int, ...]:
        """Take all locks of a request, or none. Returns the indices of its choices.

        Args:
            request: The locks to take.
            pauses: Waits for the next attempt, or raises. Yields whether it is time to queue.
        """
        taken: dict[DeviceLock, int] = {}
        try:
            while (chosen := self._try_all(request, taken)) is None:
                _close(taken)
                if next(pauses):
                    self._queue_up(request)
            self._locks |= {lock: taken.pop(lock) for lock in request.locks_of(chosen)}
        finally:
            _close(taken)
        _close(self._queued)
        self._write_line()
        return chosen

    def _try_all(self, request: LockRequest, taken: dict[DeviceLock, int]) -> tuple[int, ...] | None:
        if not self._try(request.always, taken):
            return None
        return request.select(lambda choice: self._try(choice, taken))

    def _try(self, wanted: Iterable[DeviceLock], taken: dict[DeviceLock, int]) -> bool:
        """Add locks to ``taken`` if all are free, and nobody else queues for one."""
        missing = [lock for lock in wanted if lock not in taken]
        for lock in missing:
            descriptor = _lock(self.directory, lock_name(lock.device), shared=lock.shared)
            if descriptor is not None:
                taken[lock] = descriptor
            if descriptor is None or not (lock in self._queued or self._is_unqueued(lock)):
                _close(taken, [each for each in missing if each in taken])
                return False
        return True

    def _queue_up(self, request: LockRequest) -> None:
        """Lock the queues of all devices in the order of their names, up to the first that another has."""
        for lock in sorted(request.all_locks - self._queued.keys()):
            descriptor = _lock(self.directory, _queue_name(lock.device), shared=lock.shared)
            if descriptor is None:
                return
            self._queued[lock] = descriptor
            self._write_line()

    def lend_descriptors(self) -> tuple[int, ...]:
        """Return descriptors for processes that use the GPUs. The lease lasts while any of them is open.

        End these processes before ``release``; a process left running keeps its GPUs locked. The lock of the
        CPU is never lent: a process left running would block every test of the host, including tests on
        GPUs.
        """
        gpus = [descriptor for lock, descriptor in self._locks.items() if lock.device != CPU]
        return (*gpus, self._file.descriptor) if gpus else ()

    def is_wanted(self) -> bool:
        """Return whether another process queues for one of the GPUs."""
        gpus = (lock for lock in self._locks if lock.device != CPU and not lock.shared)
        return not all(map(self._is_unqueued, gpus))

    def _is_unqueued(self, lock: DeviceLock) -> bool:
        """Return whether nobody queues who excludes this lock."""
        return is_free(self.directory, _queue_name(lock.device), shared=lock.shared)

    def describe_others(self, request: LockRequest) -> str:
        """Return what a request needs, and who holds it or queues for it."""
        any_mode = {lock.device for lock in request.all_locks}
        exclusive = {lock.device for lock in request.all_locks if not lock.shared}
        parts = []
        for holder, who in list_holders(self.directory, without=self._file.name):
            if found := {*holder.devices} & any_mode | {*holder.shared} & exclusive:
                # The message has already named what was requested.
                which = "" if found == {*request.devices} else f"{', '.join(sorted(found))} "
                parts.append(f"{which}held by {who}")
        wanted = f"{request.n} of " if 0 < request.n < len(request.choices) else ""
        return f"{wanted}{', '.join(request.devices)}: {'; '.join(parts) or 'held by an unknown process'}"

    def assign_to(self, test: str) -> None:
        """Use the devices for this test from now on, and show its name to others."""
        self._test = test
        self._write_line()

    def mark_idle(self) -> None:
        """Show that no test uses the devices, on which ranks wait for the next test."""
        self.assign_to(f"idle ranks of {self._test}")

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Release all locks except the wanted ones."""
        _close(self._locks, [lock for lock in self._locks if lock not in wanted])
        self._write_line()

    def release(self) -> None:
        """Release everything. May be called again."""
        if self not in _HELD:
            return
        _HELD.remove(self)
        self._close_locks()
        self._file.remove()
        self.directory.close()

    def close_inherited(self) -> None:
        """Close what a forked child inherited: it does not use the devices, and must not keep them."""
        self._close_locks()
        os.close(self._file.descriptor)
        self.directory.close()

    def _close_locks(self) -> None:
        _close(self._locks)
        _close(self._queued)

    def _write_line(self) -> None:
        exclusive = {lock.device for lock in (*self._locks, *self._queued) if not lock.shared}
        # Who only queues excludes nobody who shares.
        shared = {lock.device for lock in self._locks if lock.shared}
        self._file.write(self._test, exclusive, shared)


#: The leases of this process.
_HELD: set[Held] = set()


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
        DeviceError: The wait timed out (the message names all holders), or there is no lock directory.
    """
    gpus = tuple(lock for lock in request.always if lock.device != CPU)
    host = tuple(lock for lock in request.always if lock.device == CPU)
    directory = open_directory()
    release = directory.close
    try:
        own = {lock.device for held in _HELD for lock in held.locks}
        held = Held(directory, test)
        release = held.release
        # A pytest within a test would wait for itself.
        wait_s = wait_s if own.isdisjoint(lock.device for lock in request.all_locks) else 0.0
        pauses = _wait(held, request, wait_s, on_wait)
        held.chosen = held.take(replace(request, always=gpus), pauses)
        if host:
            held.take(LockRequest(host), pauses)
        return held
    except OSError as error:
        release()
        raise DeviceError(
            f"gpus: no lease can be taken in {directory.path}: {error}; set {LOCK_DIR_VARIABLE} to another "
            "directory"
        ) from None
    except BaseException:
        release()
        raise


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


def _lock(directory: LockDirectory, name: str, *, shared: bool) -> int | None:
    """Lock a file, which is created if it is missing. Returns None if another process has locked it.

    It is opened for reading only, so that every user can lock a file that another user has created.
    """
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory.descriptor)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.close(directory.create(name))
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


def is_free(directory: LockDirectory, name: str, *, shared: bool = True) -> bool:
    """Return whether this process could lock a file now."""
    descriptor = _lock(directory, name, shared=shared)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None
