# SPDX-License-Identifier: Apache-2.0
"""Taking devices, all or none, in turn with every other process of the host.

Who has a device is decided by the kernel's ``flock`` on its file (``lockfile``), so that nothing is left to
clean up after a death. Who goes first is told by tickets (``tickets``, ``turns``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Protocol

from pytest_llenergy.devices import queue
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import LOCK_DIR_VARIABLE, LockDirectory, open_lock_directory
from pytest_llenergy.devices.lockfiles import is_current, lock_name, try_lock, unlock
from pytest_llenergy.devices.queue import QueuePlace, Ticket
from pytest_llenergy.devices.timeouts import (
    QUEUE_POLL_FIRST_S,
    QUEUE_POLL_GROWTH,
    QUEUE_POLL_LONGEST_S,
    WAIT_MESSAGE_EVERY_S,
    WAIT_MESSAGE_FIRST_S,
)
from pytest_llenergy.errors import DeviceError

#: What this process holds, by all of its leases.
_held: list[Held] = []


class Holding(Protocol):
    """Devices that are ours for now; see ``Held``."""

    @property
    def claims(self) -> tuple[DeviceLock, ...]: ...
    @property
    def chosen(self) -> tuple[int, ...]: ...
    @property
    def directory(self) -> LockDirectory: ...
    def lend(self) -> tuple[int, ...]: ...
    def intact(self) -> bool: ...
    def serve(self, test: str) -> None: ...
    def rest(self) -> None: ...
    def keep_only(self, wanted: Collection[DeviceLock]) -> None: ...
    def release(self) -> None: ...


class Held:
    """Devices that are ours until ``release``, or until we and those who share our descriptors end.

    ``chosen`` are the places of the request's choices that were taken. While ``idle`` it serves no test, and
    somebody in this process makes sure that it is given up when others queue for it.
    """

    def __init__(
        self,
        directory: LockDirectory,
        ticket: Ticket,
        locks: dict[DeviceLock, int],
        chosen: tuple[int, ...],
    ) -> None:
        self._directory = directory
        self._ticket: Ticket | None = ticket
        self._locks = locks
        self._pid = os.getpid()
        self._lent = False
        self.chosen = chosen
        self.idle: bool = False
        _held.append(self)

    @property
    def claims(self) -> tuple[DeviceLock, ...]:
        """What is held."""
        return tuple(self._locks)

    @property
    def directory(self) -> LockDirectory:
        """The lock directory, open as long as this is held."""
        return self._directory

    def lend(self) -> tuple[int, ...]:
        """Descriptors for processes that use the GPUs: these stay ours as long as one of them has these.

        They are to be ended before ``release``. What they leave running keeps its GPUs. The CPU is never
        lent: what somebody leaves running there would stop every test of the host, also those on GPUs.
        """
        gpus = tuple(descriptor for claim, descriptor in self._locks.items() if claim.device != CPU)
        if not gpus or self._ticket is None:
            return ()
        self._lent = True
        return (*gpus, self._ticket.descriptor)

    def intact(self) -> bool:
        """Whether the lock files are still there. One that somebody removed has kept nobody else out."""
        return all(
            is_current(self._directory, lock_name(claim.device), each) for claim, each in self._locks.items()
        )

    def serve(self, test: str) -> None:
        """It is for this test from now on, and others are told so."""
        self.idle = False
        self._tell(test)

    def rest(self) -> None:
        """No test has it for now: ranks wait on it for the next one."""
        self.idle = True
        if self._ticket is not None:
            self._tell(f"idle ranks of {self._ticket.test}")

    def _tell(self, test: str) -> None:
        # It is for messages only: who has the devices does not hang on it, nor does a test on a full disk.
        if self._ticket is not None:
            with suppress(OSError):
                self._ticket.tell(test)

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Give up all other claims; everything if none of these is held."""
        if self._ticket is None or os.getpid() != self._pid:
            return
        given_up = [claim for claim in self._locks if claim not in wanted]
        for claim in given_up:
            unlock(claim, self._locks.pop(claim))
        if not self._locks:
            self._end(self._ticket)
        elif given_up:
            self._ticket.hold(self.claims)

    def release(self) -> None:
        """Give up everything. May be called again; does nothing in a forked child."""
        self.keep_only(())

    def _end(self, ticket: Ticket) -> None:
        self._ticket = None
        _held.remove(self)
        ticket.close(lent=self._lent)
        self._directory.close()

    def forget(self) -> None:
        """Close what a forked child inherited: children of pytest are not those that use the devices."""
        descriptors = [*self._locks.values(), self._directory.descriptor]
        descriptors += [self._ticket.descriptor] if self._ticket is not None else []
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)


class Borrowed:
    """A part of what this process already holds, by one lease or by several. Ends with these."""

    def __init__(
        self, owners: Sequence[Held], claims: tuple[DeviceLock, ...], chosen: tuple[int, ...]
    ) -> None:
        self._owners = tuple(owners)
        self.claims: tuple[DeviceLock, ...] = claims
        self.chosen = chosen
        self.directory: LockDirectory = self._owners[0].directory

    def lend(self) -> tuple[int, ...]:
        """The owners' descriptors."""
        return tuple(each for owner in self._owners for each in owner.lend())

    def intact(self) -> bool:
        """Whether the owners' lock files are still there."""
        return all(owner.intact() for owner in self._owners)

    def serve(self, test: str) -> None:
        """The owners' tickets name the test that this one is a part of."""

    def rest(self) -> None:
        """The owners' own test goes on: what is borrowed is not idle."""

    def keep_only(self, wanted: Collection[DeviceLock]) -> None:
        """Forget the others; the owners keep them."""
        self.claims = tuple(claim for claim in self.claims if claim in wanted)

    def release(self) -> None:
        """Forget them all."""
        self.claims = ()


def ignore_message(waits: str) -> None:
    """Nobody looks on."""


def acquire(
    request: LockRequest,
    wait_s: float,
    test: str = "",
    where: Callable[[], LockDirectory] = open_lock_directory,
    tell: Callable[[str], None] = ignore_message,
) -> Holding:
    """Take what a request names, all or none, waiting in turn for up to ``wait_s`` seconds.

    ``test`` is what others are told of us, ``tell`` is told for whom we wait, every few seconds. A process
    that already holds devices gets a part of these at once, and ``DeviceError`` for any other. Raises
    ``DeviceError`` naming all holders when the time is up, and for a directory or file that cannot be
    trusted.
    """
    borrowed = _borrow(request)
    if borrowed is not None:
        return borrowed
    with ExitStack() as undo:
        directory = where()
        undo.callback(directory.close)
        try:
            ticket = Ticket(directory, request, test)
            undo.callback(ticket.close)
            locks: dict[DeviceLock, int] = {}
            undo.callback(_unlock_all, locks)
            turn = QueuePlace(directory, ticket)
            chosen, _ = _try_lock_all(directory, request, turn.first_look().blocked, locks)
            if chosen is None:
                chosen = _wait(turn, request, wait_s, locks, tell)
            ticket.hold(tuple(locks))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and directory.is_gone():
                raise directory.gone() from None
            raise DeviceError(
                f"gpus: no lease can be taken in {directory.path}: {error.strerror}; set {LOCK_DIR_VARIABLE} to "
                "another directory"
            ) from None
        undo.pop_all()
    return Held(directory, ticket, locks, chosen)


def _borrow(request: LockRequest) -> Borrowed | None:
    # A test on warm ranks has two: their board's lease, and the CPU's.
    owners = [held for held in _held if not held.idle]
    if not owners:
        return None
    own = tuple(dict.fromkeys(claim for held in owners for claim in held.claims))
    chosen = request.fit(set(own).issuperset)
    if chosen is None:
        raise DeviceError(queue.nested_request_message(own, request))
    return Borrowed(owners, request.claims(chosen), chosen)


def _wait(
    turn: QueuePlace,
    request: LockRequest,
    wait_s: float,
    locks: dict[DeviceLock, int],
    tell: Callable[[str], None],
) -> tuple[int, ...]:
    deadline_s = time.monotonic() + wait_s
    tell_s = time.monotonic() + WAIT_MESSAGE_FIRST_S
    ticket = turn.ticket
    ticket.become("waiting")
    pause_s, firm = QUEUE_POLL_FIRST_S, False
    while True:
        scene = turn.look()
        chosen, refused = _try_lock_all(turn.directory, request, scene.blocked, locks)
        if chosen is not None:
            return chosen
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeviceError(queue.timeout_message(request, wait_s, scene, refused))
        if time.monotonic() > tell_s:
            tell(queue.wait_message(request, scene, refused))
            tell_s = time.monotonic() + WAIT_MESSAGE_EVERY_S
        if turn.out_of_patience and not firm:
            ticket.become("firm")
            firm = True
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * QUEUE_POLL_GROWTH, QUEUE_POLL_LONGEST_S)
        ticket.beat()


def _try_lock_all(
    directory: LockDirectory,
    request: LockRequest,
    blocked: Callable[[tuple[DeviceLock, ...]], bool],
    locks: dict[DeviceLock, int],
) -> tuple[tuple[int, ...] | None, tuple[DeviceLock, ...]]:
    """Lock what is wanted into ``locks`` if all of it can be had now; otherwise nothing stays locked.

    Also returns what others had locked.
    """
    refused: list[DeviceLock] = []

    def lock(claims: tuple[DeviceLock, ...]) -> bool:
        if blocked(claims):
            return False
        fresh: list[DeviceLock] = []
        for claim in claims:
            if claim in locks:
                continue
            descriptor = try_lock(directory, claim)
            if descriptor is None:
                refused.append(claim)
                for each in fresh:
                    unlock(each, locks.pop(each))
                return False
            locks[claim] = descriptor
            fresh.append(claim)
        return True

    if lock(request.always):
        places = range(len(request.choices))
        chosen = tuple(islice((place for place in places if lock(request.choices[place])), request.n))
        if len(chosen) == request.n:
            return chosen, ()
    _unlock_all(locks)
    return None, tuple(refused)


def _unlock_all(locks: dict[DeviceLock, int]) -> None:
    for claim, descriptor in locks.items():
        unlock(claim, descriptor)
    locks.clear()


def _close_in_child() -> None:
    for held in _held:
        held.forget()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
