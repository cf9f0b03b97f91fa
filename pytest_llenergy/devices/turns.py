# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: first come, first served, where it matters.

A request waits for an earlier one if both want the same device and the earlier one could be served now, or
has been passed often enough. An earlier one that waits for devices still in use may be passed by those that
can do with what is free meanwhile: otherwise boards would idle while a test that needs all of them waits for
the last. After ``PASSES`` of these it is firm: nobody passes any more, so that no request starves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_llenergy.devices.claims import Claim, conflict
from pytest_llenergy.devices.lockdir import Directory
from pytest_llenergy.devices.tickets import Seen, Ticket, living

#: How many later requests may go before an earlier one that they conflict with: about one a board.
PASSES = 8

#: After so many seconds a request lets nobody pass, however few it has seen: it may have overlooked some.
PATIENCE_S = 60.0

#: Who has given no sign of life for so many seconds is stopped, and must not hold up the others. It keeps its
#: place for when it goes on.
STOPPED_S = 2.0

#: One look in so many also removes dead tickets that nobody is looking at.
CLEANING = 16


@dataclass(frozen=True)
class Scene:
    """The queue at one moment, as one of those who wait sees it: who is ahead, and who has what."""

    ahead: tuple[Seen, ...] = ()
    holding: tuple[Seen, ...] = ()

    def blocked(self, claims: tuple[Claim, ...]) -> bool:
        """Whether these must be left to somebody who came earlier.

        What is in use at this moment may be free in the next; then it is for those who waited for it.
        """
        rivals = [seen for seen in self.ahead if not is_stopped(seen) and seen.content.request.wants(claims)]
        if not rivals:
            return False
        return conflict(claims, in_use(self.holding)) or any(
            seen.state == "firm" or could_be_served(seen, self.holding) for seen in rivals
        )


def is_stopped(seen: Seen) -> bool:
    """Whether its maker has given no sign of life for too long."""
    return time.time() - seen.beat_s > STOPPED_S


def in_use(holding: Sequence[Seen]) -> list[Claim]:
    """What these tickets say that they hold."""
    return [claim for holder in holding for claim in holder.holds]


def could_be_served(seen: Seen, holding: Sequence[Seen]) -> bool:
    """Whether what somebody waits for is free, as far as the tickets tell."""
    busy = in_use(holding)
    return seen.content.request.fit(lambda claims: not conflict(claims, busy)) is not None


@dataclass
class Turn:
    """Our own place in the queue."""

    directory: Directory
    ticket: Ticket
    passed_by: set[str] = field(default_factory=set)
    began_s: float = field(default_factory=time.monotonic)

    def first_look(self) -> Scene:
        """Before we are in the queue. Who holds what matters only where somebody waits."""
        if random.randrange(CLEANING) == 0:
            living(self.directory, ("holding",), self.ticket.order)
        ahead = living(self.directory, ("waiting", "firm"), self.ticket.order)
        return self.look() if ahead else Scene()

    def look(self) -> Scene:
        """While we wait: note who has passed us, and let nobody pass after too many."""
        seen = living(self.directory, ("waiting", "firm", "holding"), self.ticket.order)
        ahead = tuple(each for each in seen if each.state != "holding" and each.order < self.ticket.order)
        holding = tuple(each for each in seen if each.state == "holding")
        self.passed_by.update(
            each.order
            for each in holding
            if each.order > self.ticket.order and self.ticket.request.wants(each.holds)
        )
        return Scene(ahead, holding)

    @property
    def out_of_patience(self) -> bool:
        """Whether enough have passed."""
        return len(self.passed_by) >= PASSES or time.monotonic() - self.began_s > PATIENCE_S


def waits(directory: Directory, claims: tuple[Claim, ...], least_s: float = 0.0) -> bool:
    """Whether somebody waits for one of these, since ``least_s`` seconds, and has to."""
    queue = [
        seen
        for seen in living(directory, ("waiting", "firm"))
        if seen.waited_s >= least_s and not is_stopped(seen) and seen.content.request.wants(claims)
    ]
    if not queue:
        return False
    holding = living(directory, ("holding",))
    return any(not could_be_served(seen, holding) for seen in queue)
