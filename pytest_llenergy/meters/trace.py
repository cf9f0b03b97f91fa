# SPDX-License-Identifier: Apache-2.0
"""What the meters said: for each domain, the moments at which its counter moved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pytest_llenergy.meters.base import Domain

#: A counter of known period cannot have been still for longer than this many periods before it was seen
#: to have moved, however long nobody looked.
LONGEST_TICK = 1.5

#: Ticks from which the period of a counter is taken.
LATEST = 256

#: A counter is wrong that moves by so many times the highest power, over so many periods more than passed.
JUMP, JUMP_PERIODS = 1.5, 1.0

#: Ticks on either side of a moment from which the power there is taken.
NEIGHBOURS = 3


class Tick(NamedTuple):
    """The counter moved to ``energy_j`` at some moment between two others, monotonic nanoseconds."""

    earliest_ns: int
    latest_ns: int
    energy_j: float

    @property
    def time_ns(self) -> int:
        """The middle of the interval."""
        return (self.earliest_ns + self.latest_ns) // 2

    @property
    def gap_s(self) -> float:
        """The length of the interval."""
        return (self.latest_ns - self.earliest_ns) / 1e9


class Mark(NamedTuple):
    """A window began or ended, at a monotonic moment: power may have changed then."""

    time_ns: int
    begins: bool


class Outage(NamedTuple):
    """From when to when a domain could not be read, or its counter could not be believed, and why."""

    start_ns: int
    end_ns: int
    reason: str


class Series:
    """The ticks of one domain in time order.

    Joules go on rising over an ``Outage``, so that what lies between two of them stays right; a window
    that touches one has no number. ``late`` holds the stretches in which nobody read although a reading
    was due.
    """

    def __init__(self, meter: str, domain: Domain) -> None:
        self.meter = meter
        self.domain = domain
        self.ticks: list[Tick] = []
        self.outages: list[Outage] = []
        self.late: list[tuple[int, int]] = []
        self._late_ns = round(domain.late_s[0] * 1e9), round(domain.late_s[1] * 1e9)
        self._last: tuple[int, float] | None = None
        self._offset_j = 0.0
        self._out = False

    def add(self, begin_ns: int, end_ns: int, energy_j: float) -> None:
        """Note what a reading between two moments said; only one that moved the counter is a tick."""
        last, self._last = self._last, (begin_ns, energy_j)
        if self._out:
            self._out_until(end_ns)
            self._out = False
        wrong = self._wrong(last, end_ns, energy_j) if last is not None else None
        if last is not None and wrong is not None:
            self._outage(last[0], end_ns, f"{self.meter}: the counter of {self.domain.name} {wrong}")
            self._offset_j += last[1] - energy_j
        elif last is None:
            # When a counter came to its first value is not known, unless a reading is never old.
            if self.domain.max_age_s is not None:
                self._tick(self._oldest(begin_ns), end_ns, energy_j)
        elif energy_j > last[1]:
            self._tick(max(last[0], self._oldest(begin_ns)), end_ns, energy_j)

    def _wrong(self, last: tuple[int, float], end_ns: int, energy_j: float) -> str | None:
        """Why a counter cannot be believed that moved so since the reading before."""
        if energy_j < last[1]:
            return f"went backwards, from {last[1]:.3f} J to {energy_j:.3f} J; it was reset or is broken"
        if self._jumped(last, end_ns, energy_j):
            return (
                f"jumped by {energy_j - last[1]:.3f} J in {(end_ns - last[0]) / 1e6:.0f} ms, of a board that "
                f"may draw {self.domain.highest_w:.0f} W"
            )
        return None

    def _jumped(self, last: tuple[int, float], end_ns: int, energy_j: float) -> bool:
        """Whether a counter moved by what no board can have used; it tells late, but not by many ticks."""
        if self.domain.highest_w is None or not self.ticks:
            return False
        # What it has counted since it last moved; a reading in between told nothing.
        since_ns = min(last[0], self.ticks[-1].earliest_ns)
        period_s = self.domain.update_period_s or 0.0
        elapsed_s = (end_ns - since_ns) / 1e9 + JUMP_PERIODS * period_s + self.domain.smear_s
        return energy_j - last[1] > JUMP * self.domain.highest_w * elapsed_s

    def fail(self, time_ns: int, reason: str) -> None:
        """Note that a reading gave a reason instead of joules; the next one that does not ends that."""
        if self._out:
            self._out_until(time_ns)
        else:
            self._outage(self._last[0] if self._last else time_ns, time_ns, reason)
            self._out = True

    def miss(self, start_ns: int, end_ns: int, reason: str) -> None:
        """Note a stretch of which later readings do not tell what was used in it."""
        # One that still goes on stays the last.
        self.outages.insert(
            len(self.outages) - self._out, Outage(start_ns - self._late_ns[1], end_ns, reason)
        )

    @property
    def reason(self) -> str | None:
        """Why there are no joules at present."""
        return self.outages[-1].reason if self._out else None

    def reason_between(self, start_ns: int, end_ns: int) -> str | None:
        """Why the ticks around an interval say nothing about it; ``None`` if they do."""
        before, after = self.before(start_ns), self.after(end_ns + self.smear_ns)
        for outage in self.outages:
            begins_in_time = after is None or outage.start_ns < after.latest_ns
            if begins_in_time and (before is None or outage.end_ns > before.earliest_ns):
                return outage.reason
        return None

    def _out_until(self, end_ns: int) -> None:
        self.outages[-1] = self.outages[-1]._replace(end_ns=end_ns)

    def _outage(self, start_ns: int, end_ns: int, reason: str) -> None:
        self.outages.append(Outage(start_ns - self._late_ns[1], end_ns, reason))

    def _tick(self, earliest_ns: int, latest_ns: int, energy_j: float) -> None:
        at_least_ns, at_most_ns = self._late_ns
        earliest_ns, latest_ns = earliest_ns - at_most_ns, latest_ns - at_least_ns
        self.ticks.append(Tick(earliest_ns, latest_ns, energy_j + self._offset_j))

    def _oldest(self, begin_ns: int) -> int:
        """Before this the counter cannot have moved for the last time."""
        if self.domain.max_age_s is not None:
            return begin_ns - round(self.domain.max_age_s * 1e9)
        period_s = self.domain.update_period_s
        return begin_ns - round(period_s * LONGEST_TICK * 1e9) if period_s else 0

    def before(self, time_ns: int) -> Tick | None:
        """The last tick that was surely over at a moment."""
        index = bisect_right(self.ticks, time_ns, key=_latest) - 1
        return self.ticks[index] if index >= 0 else None

    def after(self, time_ns: int) -> Tick | None:
        """The first tick that surely came at or after a moment."""
        index = bisect_left(self.ticks, time_ns, key=_earliest)
        return self.ticks[index] if index < len(self.ticks) else None

    def settled(self, time_ns: int, ticks: int = 1) -> bool:
        """Whether so many ticks have come after a moment, or none will."""
        return self.reason is not None or len(self.around(time_ns + self.smear_ns, ticks)[1]) >= ticks

    @property
    def shift_s(self) -> float:
        """The width of what is not known of how late all ticks are alike (seconds)."""
        at_least_s, at_most_s = self.domain.late_s
        return at_most_s - at_least_s

    def as_one(self, ticks: Sequence[Tick]) -> list[Tick]:
        """Ticks without what is not known of all of them alike: as they lie to one another."""
        half_ns = round(self.shift_s * 1e9 / 2)
        return [
            tick._replace(earliest_ns=tick.earliest_ns + half_ns, latest_ns=tick.latest_ns - half_ns)
            for tick in ticks
        ]

    def latest_ns(self, default_ns: int) -> int:
        """When the counter last ticked, or else the default."""
        return self.ticks[-1].latest_ns if self.ticks else default_ns

    @property
    def smear_ns(self) -> int:
        """How long after a change of power the readings show it in full (nanoseconds)."""
        return round(self.domain.smear_s * 1e9)

    def between(self, start_ns: int, end_ns: int) -> list[Tick]:
        """The ticks that surely came within a closed interval."""
        first = bisect_left(self.ticks, start_ns, key=_earliest)
        last = bisect_right(self.ticks, end_ns, key=_latest)
        return self.ticks[first:last]

    def around(self, time_ns: int, n: int) -> tuple[list[Tick], list[Tick]]:
        """Up to ``n`` ticks surely before a moment and ``n`` surely after it, in time order."""
        last = bisect_right(self.ticks, time_ns, key=_latest)
        first = bisect_left(self.ticks, time_ns, key=_earliest)
        return self.ticks[max(0, last - n) : last], self.ticks[first : first + n]

    def spanning(self, start_ns: int, end_ns: int, n: int) -> list[Tick]:
        """All ticks from the ``n``-th that was surely before an interval to the ``n``-th surely after it."""
        first = bisect_right(self.ticks, start_ns, key=_latest)
        last = bisect_left(self.ticks, end_ns, key=_earliest)
        return self.ticks[max(0, first - n) : last + n]

    def latest_pause_s(self, start_ns: int, end_ns: int) -> float:
        """The longest stretch without a due reading that touches an interval (seconds)."""
        touching = [end - begin for begin, end in self.late if begin < end_ns and end > start_ns]
        return max(touching, default=0) / 1e9

    @property
    def period_s(self) -> float | None:
        """The period of the counter: as it is known, or else as it was seen."""
        return self.domain.update_period_s or self.tick_period_s

    @property
    def tick_period_s(self) -> float | None:
        """Median time between the latest ticks as seen; ``None`` below three ticks."""
        if len(self.ticks) < 3:
            return None
        steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(self.ticks[-LATEST:]))
        return steps[len(steps) // 2] / 1e9


def _earliest(tick: Tick) -> int:
    return tick.earliest_ns


def _latest(tick: Tick) -> int:
    return tick.latest_ns
