# SPDX-License-Identifier: Apache-2.0
"""A lease: the devices that belong to one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pytest_llenergy.model.environment import Board

# What a test wants of devices: claims, and requests that leave open which of several devices it gets.

#: The CPU, as a device.
CPU = "cpu"


class DeviceLock(msgspec.Struct, frozen=True, array_like=True):
    """A device (full UUID, or ``cpu``) for oneself, or ``shared`` with others that claim it shared.

    Who has a MIG instance claims it for itself and its board shared: so an instance and its whole board
    exclude each other, and two instances of one board do not.
    """

    device: str
    shared: bool = False

    def conflicts(self, other: DeviceLock) -> bool:
        """Whether the two cannot be had at once."""
        return self.device == other.device and not (self.shared and other.shared)


class LockRequest(msgspec.Struct, frozen=True):
    """All of ``always``, and ``n`` of ``choices``. A choice is one device with the claims that it takes."""

    always: tuple[DeviceLock, ...] = ()
    n: int = 0
    choices: tuple[tuple[DeviceLock, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what nobody can ask for; others' tickets may say anything."""
        if self.n < 0 or not all(self.choices):
            raise ValueError("a request needs n >= 0 and choices that are not empty")

    @property
    def devices(self) -> tuple[str, ...]:
        """What it names, in its order; the board that an instance is a part of only where it is asked for."""
        named = [claim.device for claim in self.always if not claim.shared]
        named += [choice[0].device for choice in self.choices]
        return tuple(dict.fromkeys(named))

    def wants(self, claims: Iterable[DeviceLock]) -> bool:
        """Whether it may take something that conflicts with one of these."""
        own = {claim for choice in (self.always, *self.choices) for claim in choice}
        return any_conflict(own, claims)

    def fit(self, possible: Callable[[tuple[DeviceLock, ...]], bool]) -> tuple[int, ...] | None:
        """The first ``n`` choices that are possible; ``None`` if these are fewer, or ``always`` is not."""
        if not possible(self.always):
            return None
        found = [place for place, choice in enumerate(self.choices) if possible(choice)]
        return tuple(found[: self.n]) if len(found) >= self.n else None

    def claims(self, chosen: Iterable[int]) -> tuple[DeviceLock, ...]:
        """All claims of these choices, each once, in one order that is the same for every request."""
        taken = {claim for place in chosen for claim in self.choices[place]}
        return tuple(sorted({*self.always, *taken}, key=lambda claim: (claim.device, claim.shared)))


def any_conflict(ours: Iterable[DeviceLock], theirs: Iterable[DeviceLock]) -> bool:
    """Whether some claim of one side excludes one of the other."""
    by_device: dict[str, list[DeviceLock]] = {}
    for claim in ours:
        by_device.setdefault(claim.device, []).append(claim)
    return any(claim.conflicts(own) for claim in theirs for own in by_device.get(claim.device, ()))


# The devices that belong to one test while it runs.

__all__ = ["CPU", "Lease", "join"]


@dataclass(frozen=True)
class Lease:
    """Devices that belong to one test while it runs.

    ``devices`` names one device a rank: full UUIDs of GPUs or MIG instances, or ``cpu`` as often as there are
    CPU ranks. ``boards`` and ``indices`` tell of each what it is and its place in PCI order; ``divided`` are
    the UUIDs of the boards that leased instances are parts of.
    ``fallback`` is ``"cpu"`` where GPUs were asked for and the mark allowed CPU ranks instead.

    Before the locks are taken, ``devices`` are those that the test would have first and ``choices`` every one
    that would do, each as a lease of its own, the best first; without choices it must be ``devices``. Those
    that are taken get the ``order`` of the environment, whichever they are.
    """

    devices: tuple[str, ...]
    boards: tuple[Board, ...] = ()
    indices: tuple[int, ...] = ()
    fallback: str | None = None
    divided: tuple[str, ...] = ()
    choices: tuple[Lease, ...] = ()
    order: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """Full UUIDs of the leased GPUs; empty for a CPU lease."""
        return tuple(board.uuid for board in self.boards)

    @property
    def claims(self) -> tuple[DeviceLock, ...]:
        """Its devices for itself, and the boards that its instances are parts of shared with others.

        Tests on sibling instances run side by side: the joules of both are those of the board, which is what
        the flag ``shared-board`` says.
        """
        own = [DeviceLock(device) for device in dict.fromkeys(self.devices)]
        return (*own, *(DeviceLock(board, shared=True) for board in self.divided))

    @property
    def names(self) -> tuple[str, ...]:
        """Product names of the leased GPUs."""
        return tuple(board.name for board in self.boards)

    @property
    def visible_devices(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` is set to for a process that may use the whole lease."""
        return ",".join(self.uuids)

    def request(self, also: Sequence[DeviceLock] = ()) -> LockRequest:
        """What is to be locked: as many of the choices as there are devices, and always ``also``."""
        if not self.choices:
            return LockRequest(always=(*self.claims, *also))
        choices = tuple(one.claims for one in self.choices)
        return LockRequest(always=tuple(also), n=len(self.devices), choices=choices)

    def chosen(self, places: Iterable[int]) -> Lease:
        """The lease of the choices in these places; itself when there was nothing to choose."""
        if not self.choices:
            return self
        taken = [self.choices[place] for place in places]
        if self.order:
            taken.sort(key=lambda one: self.order.index(one.devices[0]))
        return join_leases(taken)


def join_leases(leases: Sequence[Lease]) -> Lease:
    """One lease of the devices of several."""
    return Lease(
        devices=tuple(device for lease in leases for device in lease.devices),
        boards=tuple(board for lease in leases for board in lease.boards),
        indices=tuple(index for lease in leases for index in lease.indices),
        divided=tuple(dict.fromkeys(board for lease in leases for board in lease.divided)),
    )
