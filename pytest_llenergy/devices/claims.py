# SPDX-License-Identifier: Apache-2.0
"""What a test wants of devices: claims, and requests that leave open which of several devices it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

#: The CPU, as a device.
CPU = "cpu"


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A device (full UUID, or ``cpu``) for oneself, or ``shared`` with others that claim it shared.

    Who has a MIG instance claims it for itself and its board shared: so an instance and its whole board
    exclude each other, and two instances of one board do not.
    """

    device: str
    shared: bool = False

    def conflicts(self, other: Claim) -> bool:
        """Whether the two cannot be had at once."""
        return self.device == other.device and not (self.shared and other.shared)


class Request(msgspec.Struct, frozen=True):
    """All of ``always``, and ``n`` of ``choices``. A choice is one device with the claims that it takes."""

    always: tuple[Claim, ...] = ()
    n: int = 0
    choices: tuple[tuple[Claim, ...], ...] = ()

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

    def wants(self, claims: Iterable[Claim]) -> bool:
        """Whether it may take something that conflicts with one of these."""
        own = {claim for choice in (self.always, *self.choices) for claim in choice}
        return conflict(own, claims)

    def fit(self, possible: Callable[[tuple[Claim, ...]], bool]) -> tuple[int, ...] | None:
        """The first ``n`` choices that are possible; ``None`` if these are fewer, or ``always`` is not."""
        if not possible(self.always):
            return None
        found = [place for place, choice in enumerate(self.choices) if possible(choice)]
        return tuple(found[: self.n]) if len(found) >= self.n else None

    def claims(self, chosen: Iterable[int]) -> tuple[Claim, ...]:
        """All claims of these choices, each once, in one order that is the same for every request."""
        taken = {claim for place in chosen for claim in self.choices[place]}
        return tuple(sorted({*self.always, *taken}, key=lambda claim: (claim.device, claim.shared)))


def conflict(ours: Iterable[Claim], theirs: Iterable[Claim]) -> bool:
    """Whether some claim of one side excludes one of the other."""
    by_device: dict[str, list[Claim]] = {}
    for claim in ours:
        by_device.setdefault(claim.device, []).append(claim)
    return any(claim.conflicts(own) for claim in theirs for own in by_device.get(claim.device, ()))
