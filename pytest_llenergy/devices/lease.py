# SPDX-License-Identifier: Apache-2.0
"""A lease: the devices that one test holds while it runs, and the locks on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from pytest_llenergy.record.environment import Board

#: The CPU, as a device.
CPU = "cpu"

#: Limits for tickets that others write, well above any host: 16 boards of 7 MIG instances are 112 devices.
MAX_DEVICES, MAX_DEVICE_NAME = 256, 128


class DeviceLock(msgspec.Struct, frozen=True, array_like=True):
    """A lock on a device, either exclusive or compatible with other shared locks.

    A test on a MIG instance locks the instance exclusively and its board shared. Thus an instance and its
    whole board exclude each other, but two instances of one board do not.

    Attributes:
        device: Full UUID of a board or MIG instance, or ``cpu``.
        shared: Whether others may hold a shared lock on it at the same time.
    """

    device: Annotated[str, msgspec.Meta(max_length=MAX_DEVICE_NAME)]
    shared: bool = False

    def conflicts(self, other: DeviceLock) -> bool:
        """Return whether the two locks exclude each other."""
        return self.device == other.device and not (self.shared and other.shared)


def any_conflict(first: Iterable[DeviceLock], second: Iterable[DeviceLock]) -> bool:
    """Return whether any lock of ``first`` conflicts with any lock of ``second``."""
    by_device: dict[str, list[DeviceLock]] = {}
    for lock in first:
        by_device.setdefault(lock.device, []).append(lock)
    return any(lock.conflicts(other) for lock in second for other in by_device.get(lock.device, ()))


#: Locks of a lease: each device, and each board of its MIG instances.
Locks = Annotated[tuple[DeviceLock, ...], msgspec.Meta(max_length=2 * MAX_DEVICES)]

#: Locks of one choice: a device, and the board of a MIG instance.
Choice = Annotated[tuple[DeviceLock, ...], msgspec.Meta(min_length=1, max_length=2)]


class LockRequest(msgspec.Struct, frozen=True):
    """A request for all locks of ``always``, and for ``n`` of the ``choices``, which must be of one kind.

    A choice is one device with all locks that it needs; the lock of the device itself comes first. ``kinds``
    has a number for each choice; without it all are of one kind.
    """

    always: Locks = ()
    n: int = 0
    choices: Annotated[tuple[Choice, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()
    kinds: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an invalid request, as a ticket of another process may contain."""
        if not 0 <= self.n <= len(self.choices):
            raise ValueError("a request needs at least n choices, and n >= 0")
        if len(self.kinds) not in (0, len(self.choices)):
            raise ValueError("a request needs a kind for each choice, or none")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the request names, without the boards of MIG instances, which are shared."""
        named = [lock.device for lock in self.always if not lock.shared]
        named += [choice[0].device for choice in self.choices]
        return tuple(dict.fromkeys(named))

    @property
    def all_locks(self) -> set[DeviceLock]:
        """Every lock that the request may take."""
        return {lock for choice in (self.always, *self.choices) for lock in choice}

    def conflicts_with(self, locks: Iterable[DeviceLock]) -> bool:
        """Return whether the request may take a lock that conflicts with one of these."""
        return any_conflict(self.all_locks, locks)

    @property
    def groups(self) -> list[list[int]]:
        """The indices of the choices of each kind, the preferred kind first."""
        groups: dict[int, list[int]] = {}
        for index, kind in enumerate(self.kinds or (0,) * len(self.choices)):
            groups.setdefault(kind, []).append(index)
        return [*groups.values()] or [[]]

    def select(self, is_possible: Callable[[tuple[DeviceLock, ...]], bool]) -> tuple[int, ...] | None:
        """Return the indices of the first ``n`` possible choices; None if the request cannot be met."""
        if not is_possible(self.always):
            return None
        for group in self.groups:
            possible = [index for index in group if is_possible(self.choices[index])]
            if len(possible) >= self.n:
                return tuple(possible[: self.n])
        return None

    def locks(self, chosen: Iterable[int]) -> tuple[DeviceLock, ...]:
        """Return all locks of these choices, each once, sorted the same way for every request."""
        taken = {lock for index in chosen for lock in self.choices[index]}
        return tuple(sorted({*self.always, *taken}, key=lambda lock: (lock.device, lock.shared)))


@dataclass(frozen=True, repr=False)
class Lease:
    """Devices that one test holds while it runs.

    ``devices`` names one device per rank: the full UUID of a GPU or MIG instance, or ``cpu`` for each CPU
    rank. ``boards`` describes each leased GPU, ``indices`` gives its place in PCI order, and ``divided``
    names the boards that leased MIG instances are part of. ``fallback`` is ``"cpu"`` if GPUs were requested
    and the mark allowed CPU ranks instead.

    Before the locks are taken, a lease is a plan: ``devices`` are the preferred devices, and ``choices`` has
    a lease for each suitable device, the preferred first. Without choices the test needs exactly ``devices``.
    With ``kinds``, a number for each choice, it needs devices of one kind. The devices taken keep the
    ``order`` of the environment.
    """

    devices: tuple[str, ...]
    boards: tuple[Board, ...] = ()
    indices: tuple[int, ...] = ()
    fallback: str | None = None
    divided: tuple[str, ...] = ()
    choices: tuple[Lease, ...] = ()
    kinds: tuple[int, ...] = ()
    order: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self.boards:
            ranks = f"{len(self.devices)} CPU rank{'' if len(self.devices) == 1 else 's'}"
            return f"<Lease: {ranks}{' instead of GPUs' if self.fallback else ''}>"
        boards = ", ".join(f"{board.name} {board.uuid}" for board in self.boards)
        return f"<Lease: {boards}>"

    @property
    def uuids(self) -> tuple[str, ...]:
        """Full UUIDs of the leased GPUs; empty for a CPU lease."""
        return tuple(board.uuid for board in self.boards)

    @property
    def names(self) -> tuple[str, ...]:
        """Product names of the leased GPUs."""
        return tuple(board.name for board in self.boards)

    @property
    def visible_devices(self) -> str:
        """Value of ``CUDA_VISIBLE_DEVICES`` for a process that may use the whole lease."""
        return ",".join(self.uuids)

    @property
    def locks(self) -> tuple[DeviceLock, ...]:
        """Exclusive locks on the devices, and shared locks on the boards of leased instances.

        Tests on sibling instances may run at the same time. Both then measure the energy of the whole board,
        which the flag ``shared-board`` reports.
        """
        devices = [DeviceLock(device) for device in dict.fromkeys(self.devices)]
        return (*devices, *(DeviceLock(board, shared=True) for board in self.divided))

    def request(self, also: Sequence[DeviceLock] = ()) -> LockRequest:
        """Return the locks to take: as many choices as there are devices, and all of ``also``."""
        if not self.choices:
            return LockRequest(always=(*self.locks, *also))
        choices = tuple(choice.locks for choice in self.choices)
        return LockRequest(tuple(also), len(self.devices), choices, self.kinds)

    def select(self, chosen: Iterable[int]) -> Lease:
        """Return the lease of the choices with these indices; the lease itself if it has no choices."""
        if not self.choices:
            return self
        taken = [self.choices[index] for index in chosen]
        if self.order:
            taken.sort(key=lambda choice: self.order.index(choice.devices[0]))
        return join_leases(taken)


def join_leases(leases: Sequence[Lease]) -> Lease:
    """Return one lease with the devices of several leases."""
    return Lease(
        devices=tuple(device for lease in leases for device in lease.devices),
        boards=tuple(board for lease in leases for board in lease.boards),
        indices=tuple(index for lease in leases for index in lease.indices),
        divided=tuple(dict.fromkeys(board for lease in leases for board in lease.divided)),
    )
