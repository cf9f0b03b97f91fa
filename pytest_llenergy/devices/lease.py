# SPDX-License-Identifier: Apache-2.0
"""The devices that belong to one test while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_llenergy.devices.claims import CPU, Claim, Request
from pytest_llenergy.model.environment import Board

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
    def claims(self) -> tuple[Claim, ...]:
        """Its devices for itself, and the boards that its instances are parts of shared with others.

        Tests on sibling instances run side by side: the joules of both are those of the board, which is what
        the flag ``shared-board`` says.
        """
        own = [Claim(device) for device in dict.fromkeys(self.devices)]
        return (*own, *(Claim(board, shared=True) for board in self.divided))

    @property
    def names(self) -> tuple[str, ...]:
        """Product names of the leased GPUs."""
        return tuple(board.name for board in self.boards)

    @property
    def visible_devices(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` is set to for a process that may use the whole lease."""
        return ",".join(self.uuids)

    def request(self, also: Sequence[Claim] = ()) -> Request:
        """What is to be locked: as many of the choices as there are devices, and always ``also``."""
        if not self.choices:
            return Request(always=(*self.claims, *also))
        choices = tuple(one.claims for one in self.choices)
        return Request(always=tuple(also), n=len(self.devices), choices=choices)

    def chosen(self, places: Iterable[int]) -> Lease:
        """The lease of the choices in these places; itself when there was nothing to choose."""
        if not self.choices:
            return self
        taken = [self.choices[place] for place in places]
        if self.order:
            taken.sort(key=lambda one: self.order.index(one.devices[0]))
        return join(taken)


def join(leases: Sequence[Lease]) -> Lease:
    """One lease of the devices of several."""
    return Lease(
        devices=tuple(device for lease in leases for device in lease.devices),
        boards=tuple(board for lease in leases for board in lease.boards),
        indices=tuple(index for lease in leases for index in lease.indices),
        divided=tuple(dict.fromkeys(board for lease in leases for board in lease.divided)),
    )
