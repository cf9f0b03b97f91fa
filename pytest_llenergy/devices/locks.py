# SPDX-License-Identifier: Apache-2.0
"""Lock devices, all or none, in turn with every other process of the host.

The kernel's ``flock`` on the file of a device decides which process holds it (``lockfiles``), so a process
that dies leaves nothing to clean up. Tickets decide the order (``queue``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Protocol

from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import LOCK_DIR_VARIABLE, LockDirectory, open_lock_directory
from pytest_llenergy.devices.lockfiles import is_current, lock_name, try_lock, unlock
from pytest_llenergy.devices.queue import (
    QueuePlace,
    nested_request_message,
    timeout_message,
    wait_message,
)
from pytest_llenergy.devices.tickets import RequestKey, Ticket
from pytest_llenergy.devices.timeouts import (
    QUEUE_POLL_FIRST_S,
    QUEUE_POLL_GROWTH,
    QUEUE_POLL_LONGEST_S,
    WAIT_MESSAGE_EVERY_S,
    WAIT_MESSAGE_FIRST_S,
)
from pytest_llenergy.errors import DeviceError, LeaseTimeoutError


class ProcessLeases:
    """The leases that a process holds: requests of the same process borrow from them."""

    def __init__(self) -> None:
        self._held: list[Held] = []
        #: Requests of others that this process passes, see ``QueuePlace``.
        self.passable: dict[RequestKey, float] = {}

    def add(self, held: Held) -> None:
        """Note a new lease."""
        self._held.append(held)

    def remove(self, held: Held) -> None:
        """Forget a lease that has ended."""
        self._held.remove(held)

    def in_use(self) -> list[Held]:
        """Return the leases whose devices serve a test, oldest first."""
        return [held for held in self._held if not held.idle]

    def close_inherited(self) -> None:
        """Close what a forked child inherited: its parent holds the leases."""
        for held in self._held:
            held.close_inherited()
        self._held.clear()


#: The leases of this process. There is one such object, since all that takes devices in a process must see
#: the leases of the others, or the process would wait for itself: a pytest run in a test, the doctor in a
#: run. The fork handler, which cannot be removed, needs an object that lives as long as the process.
THIS_PROCESS = ProcessLeases()
os.register_at_fork(after_in_child=THIS_PROCESS.close_inherited)


class Holding(Protocol):
    """Devices that this process holds; see ``Held``."""

    @property
    def locks(self) -> tuple[DeviceLock, ...]: ...
    @property
    def chosen(self) -> tuple[int, ...]: ...
    @property
    def directory(self) -> LockDirectory: ...
    def lend_descriptors(self) -> tuple[int, ...]: ...
    def intact(self) -> bool: ...
    def assign_to(self, test: str) -> None: ...
    def mark_idle(self) -> None: ...
    def keep_only(self, wanted: Collection[DeviceLock]) -> None: ...
    def release(self) -> None: ...


class Held:
    """Devices held until ``release``, or until this process and all others with its descriptors end.

    While ``idle``, the devices serve no test, and must be released when another process queues for them.

    Attributes:
        chosen: Indices of the choices of the request that were taken.
        idle: Whether no test uses the devices.
    """

    def __init__(
        self,
        directory: LockDirectory,
        ticket: Ticket,
        locks: dict[DeviceLock, int],
        chosen: tuple[int, ...],
        owner: ProcessLeases,
    ) -> None:
        self._directory = directory
        self._ticket: Ticket | None = ticket
        self._locks = locks
        self._pid = os.getpid()
        self._lent = False
        self.chosen = chosen
        self.idle: bool = False
        self._owner = owner
        owner.add(self)

    @property
    def locks(self) -> tuple[DeviceLock, ...]:
        """The locks that are held."""
        return tuple(self._locks)

    @property
    def directory(self) -> LockDirectory:
        """The lock directory, which stays open while any lock is held."""
        return self._directory

    def lend_descriptors(self) -> tuple[int, ...]:
        """Return descriptors for processes that use the GPUs. The lease lasts while any of them is open.

        End these processes before ``release``; a process left running keeps its GPUs locked. The lock of the
        CPU is never lent: a process left running would block every test of the host, including tests on
        GPUs.
        """
        gpus = tuple(descriptor for lock, descriptor in self._locks.items() if lock.device != CPU)
        if not gpus or self._ticket is None:
            return ()
        self._lent = True
        return (*gpus, self._ticket.descriptor)

    def intact(self) -> bool:
        """Return whether the lock files still exist. A removed file does not exclude other processes."""
        return all(
            is_current(self._directory, lock_name(lock.device), descriptor)
            for lock, descriptor in self._locks.items()
        )

    def assign_to(self, test: str) -> None:
        """Use the devices for this test from now on, and show its name to others."""
        self.idle = False
        self._show(test)

    def mark_idle(self) -> None:
        """Show that no test uses the devices, on which ranks wait for the next test."""
        self.idle = True
        if self._ticket is not None:
            self._show(f"idle ranks of {self._ticket.test}")

    def _show(self, test: str) -> None:
        # For messages only, so a full disk must not fail the test.
        if self._ticket is not None:
            with suppress(OSError):
                self._ticket.set_test(test)

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Release all locks except the wanted ones. Without any left, the lease ends."""
        if self._ticket is None or os.getpid() != self._pid:
            return
        unwanted = [lock for lock in self._locks if lock not in wanted]
        for lock in unwanted:
            unlock(lock, self._locks.pop(lock))
        if not self._locks:
            self._end(self._ticket)
        elif unwanted:
            self._ticket.hold(self.locks)

    def release(self) -> None:
        """Release everything. May be called again; does nothing in a forked child."""
        self.keep_only(())

    def _end(self, ticket: Ticket) -> None:
        self._ticket = None
        self._owner.remove(self)
        ticket.close(lent=self._lent)
        self._directory.close()

    def close_inherited(self) -> None:
        """Close the descriptors that a forked child inherited: it does not use the devices."""
        descriptors = [*self._locks.values(), self._directory.descriptor]
        descriptors += [self._ticket.descriptor] if self._ticket is not None else []
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)


class Borrowed:
    """Some of the locks that leases of this process already hold. It ends with these leases (owners)."""

    def __init__(
        self, owners: Sequence[Held], locks: tuple[DeviceLock, ...], chosen: tuple[int, ...]
    ) -> None:
        self._owners = tuple(owners)
        self.locks: tuple[DeviceLock, ...] = locks
        self.chosen = chosen
        self.directory: LockDirectory = self._owners[0].directory

    def lend_descriptors(self) -> tuple[int, ...]:
        """Return the owners' descriptors."""
        return tuple(descriptor for owner in self._owners for descriptor in owner.lend_descriptors())

    def intact(self) -> bool:
        """Return whether the owners' lock files still exist."""
        return all(owner.intact() for owner in self._owners)

    def assign_to(self, test: str) -> None:
        """Do nothing: the tickets of the owners already name the running test."""

    def mark_idle(self) -> None:
        """Do nothing: the test of the owners continues, so the devices are not idle."""

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Forget the other locks; the owners keep them."""
        self.locks = tuple(lock for lock in self.locks if lock in wanted)

    def release(self) -> None:
        """Forget all locks; the owners keep them."""
        self.locks = ()


def ignore_message(message: str) -> None:
    """Drop the messages of a wait that nobody watches."""


def acquire(
    request: LockRequest,
    wait_s: float,
    test: str = "",
    open_directory: Callable[[], LockDirectory] = open_lock_directory,
    on_wait: Callable[[str], None] = ignore_message,
    process: ProcessLeases = THIS_PROCESS,
) -> Holding:
    """Lock the devices of a request, all or none, and wait in turn for them.

    A process that already holds devices may borrow from these at once, but gets an error for any other: two
    processes that each hold devices and wait for those of the other would deadlock.

    Args:
        request: The locks to take.
        wait_s: How long to wait at most (seconds).
        test: What messages in other processes call the holder.
        open_directory: Opens the lock directory.
        on_wait: Called every few seconds of the wait with one line that names the obstacles.
        process: The leases to borrow from, which the new one joins.

    Raises:
        DeviceError: The wait timed out (the message names all holders), or the lock directory or a lock file
            cannot be trusted.
    """
    borrowed = _borrow(request, process)
    if borrowed is not None:
        return borrowed
    with ExitStack() as undo:
        directory = open_directory()
        undo.callback(directory.close)
        try:
            ticket = Ticket(directory, request, test)
            undo.callback(ticket.close)
            locks: dict[DeviceLock, int] = {}
            undo.callback(_unlock_all, locks)
            place = QueuePlace(directory, ticket, process.passable)
            chosen, _ = _try_lock_all(directory, request, place.read().is_blocked, locks)
            if chosen is None:
                chosen = _wait(place, request, wait_s, locks, on_wait)
            ticket.hold(tuple(locks))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and directory.is_gone():
                raise directory.gone_error() from None
            raise DeviceError(
                f"gpus: no lease can be taken in {directory.path}: {error.strerror}; set {LOCK_DIR_VARIABLE} "
                "to another directory"
            ) from None
        undo.pop_all()
    return Held(directory, ticket, locks, chosen, process)


def _borrow(request: LockRequest, process: ProcessLeases) -> Borrowed | None:
    # A test on warm ranks has two leases: one for their boards, and one for the CPU.
    owners = process.in_use()
    if not owners:
        return None
    locks = tuple(dict.fromkeys(lock for held in owners for lock in held.locks))
    chosen = request.select(set(locks).issuperset)
    if chosen is None:
        raise DeviceError(nested_request_message(locks, request))
    return Borrowed(owners, request.locks(chosen), chosen)


def _wait(
    place: QueuePlace,
    request: LockRequest,
    wait_s: float,
    locks: dict[DeviceLock, int],
    on_wait: Callable[[str], None],
) -> tuple[int, ...]:
    deadline_s = time.monotonic() + wait_s
    message_s = time.monotonic() + WAIT_MESSAGE_FIRST_S
    ticket = place.ticket
    ticket.set_state("waiting")
    pause_s, is_firm = QUEUE_POLL_FIRST_S, False
    while True:
        snapshot = place.read()
        chosen, refused = _try_lock_all(place.directory, request, snapshot.is_blocked, locks)
        if chosen is not None:
            return chosen
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LeaseTimeoutError(timeout_message(request, wait_s, snapshot, refused))
        if time.monotonic() > message_s:
            on_wait(wait_message(request, snapshot, refused))
            message_s = time.monotonic() + WAIT_MESSAGE_EVERY_S
        if place.is_out_of_patience and not is_firm:
            ticket.set_state("firm")
            is_firm = True
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * QUEUE_POLL_GROWTH, QUEUE_POLL_LONGEST_S)
        ticket.refresh()


def _try_lock_all(
    directory: LockDirectory,
    request: LockRequest,
    is_blocked: Callable[[tuple[DeviceLock, ...]], bool],
    locks: dict[DeviceLock, int],
) -> tuple[tuple[int, ...] | None, tuple[DeviceLock, ...]]:
    """Take all locks that the request needs, or none, and add them to ``locks``.

    Returns:
        The indices of the choices that were taken, or None; and the locks that other processes hold.
    """
    refused: list[DeviceLock] = []
    faults: dict[DeviceLock, DeviceError] = {}

    def lock_together(wanted: tuple[DeviceLock, ...]) -> bool:
        if is_blocked(wanted):
            return False
        fresh: list[DeviceLock] = []
        for lock in wanted:
            if lock in locks:
                continue
            try:
                descriptor = try_lock(directory, lock)
            except DeviceError as error:
                faults[lock] = error
                descriptor = None
            if descriptor is None:
                refused.append(lock)
                for each in fresh:
                    unlock(each, locks.pop(each))
                return False
            locks[lock] = descriptor
            fresh.append(lock)
        return True

    if lock_together(request.always):
        for group in request.groups:
            taken = (index for index in group if lock_together(request.choices[index]))
            chosen = tuple(islice(taken, request.n))
            if len(chosen) == request.n:
                return chosen, ()
            for lock in [*locks]:
                if lock not in request.always:
                    unlock(lock, locks.pop(lock))
    _unlock_all(locks)
    if request.select(faults.keys().isdisjoint) is None:
        # Waiting cannot help: without these devices there are too few.
        raise next(iter(faults.values()))
    return None, tuple(refused)


def _unlock_all(locks: dict[DeviceLock, int]) -> None:
    for lock, descriptor in locks.items():
        unlock(lock, descriptor)
    locks.clear()
