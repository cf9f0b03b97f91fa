# SPDX-License-Identifier: Apache-2.0
"""A lease: the devices that one test holds while it runs, and the locks on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pytest_llenergy.record.environment import Board

#: The CPU, as a device.
CPU = "cpu"


@dataclass(frozen=True, order=True)
class DeviceLock:
    """A lock on a device, either exclusive or compatible with other shared locks.

    A test on a MIG instance locks the instance exclusively and its board shared. Thus an instance and its
    whole board exclude each other, but two instances of one board do not.

    Attributes:
        device: Full UUID of a board or MIG instance, or ``cpu``.
        shared: Whether others may hold a shared lock on it at the same time.
    """

    device: str
    shared: bool = False


@dataclass(frozen=True)
class LockRequest:
    """A request for all locks of ``always``, and for those of ``n`` choices.

    A choice is the lock of one device, followed by others that it needs.
    """

    always: tuple[DeviceLock, ...] = ()
    n: int = 0
    choices: tuple[tuple[DeviceLock, ...], ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the request names, without the boards of MIG instances, which are shared."""
        named = [lock.device for lock in self.always if not lock.shared]
        named += [choice[0].device for choice in self.choices]
        return tuple(dict.fromkeys(named))

    @property
    def all_locks(self) -> set[DeviceLock]:
        """Every lock that the request may take."""
        return self.locks_of(range(len(self.choices)))

    def locks_of(self, chosen: Iterable[int]) -> set[DeviceLock]:
        """The locks to hold with these choices."""
        return {*self.always, *(lock for index in chosen for lock in self.choices[index])}

    def select(self, is_possible: Callable[[tuple[DeviceLock, ...]], bool]) -> tuple[int, ...] | None:
        """Return the indices of the first ``n`` possible choices; None if there are fewer."""
        possible = (index for index, choice in enumerate(self.choices) if is_possible(choice))
        chosen = tuple(islice(possible, self.n))
        return chosen if len(chosen) == self.n else None


@dataclass(frozen=True, repr=False)
class Lease:
    """Devices that one test holds while it runs.

    Before the locks are taken, a lease is a plan: ``devices`` are the preferred devices, and ``choices`` has
    a lease for each suitable device, the preferred first. Without choices the test needs exactly ``devices``.

    Attributes:
        devices: One per rank: the full UUID of a GPU or MIG instance, or ``cpu`` for each CPU rank.
        indices: Places of the GPUs in PCI order.
        fallback: ``"cpu"`` if GPUs were requested and the mark allowed CPU ranks instead.
        divided: The boards that leased MIG instances are part of.
        order: The order of the environment, which the devices that are taken keep.
    """

    devices: tuple[str, ...]
    boards: tuple[Board, ...] = ()
    indices: tuple[int, ...] = ()
    fallback: str | None = None
    divided: tuple[str, ...] = ()
    choices: tuple[Lease, ...] = ()
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
        """Exclusive locks on the devices, and shared locks on the boards of leased instances."""
        devices = [DeviceLock(device) for device in dict.fromkeys(self.devices)]
        return (*devices, *(DeviceLock(board, shared=True) for board in self.divided))

    def request(self, also: Sequence[DeviceLock] = ()) -> LockRequest:
        """Return the locks to take: as many choices as there are devices, and all of ``also``."""
        if not self.choices:
            return LockRequest(always=(*self.locks, *also))
        return LockRequest(tuple(also), len(self.devices), tuple(choice.locks for choice in self.choices))

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
