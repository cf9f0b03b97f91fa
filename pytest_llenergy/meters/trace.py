# SPDX-License-Identifier: Apache-2.0
"""The trace of the meters: for each domain, the moments at which its counter ticked, with the joules."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from pytest_llenergy.meters.base import Domain

#: A counter of known period has ticked within this many periods before any reading, however long ago the
#: previous reading was.
LONGEST_TICK = 1.5

#: Latest ticks from which the period of a counter is computed.
LATEST = 256

#: A counter is wrong if it moves by more energy than ``JUMP`` times the highest power gives in the elapsed
#: time plus ``JUMP_PERIODS`` periods.
JUMP, JUMP_PERIODS = 1.5, 1.0

#: Ticks on either side of a moment from which the power there is computed.
NEIGHBOURS = 3


class Tick(NamedTuple):
    """A move of the counter to ``energy_j`` at an unknown moment between two (monotonic nanoseconds)."""

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
    """The start or end of a window (monotonic nanoseconds), where power may have changed."""

    time_ns: int
    begins: bool


class Outage(NamedTuple):
    """A stretch in which a domain could not be read or its counter was wrong, with the reason."""

    start_ns: int
    end_ns: int
    reason: str


class Series:
    """The ticks of one domain in time order.

    Joules never fall, even over an ``Outage``, so that windows between outages stay correct; a window that
    touches an outage has no result. ``late`` holds the stretches in which a reading was overdue.
    """

    def __init__(self, meter: str, domain: Domain) -> None:
        self.meter = meter
        self.domain = domain
        self.ticks: list[Tick] = []
        #: Number of ticks so far, with those that were forgotten.
        self.ticks_seen: int = 0
        self.outages: list[Outage] = []
        self.late: list[tuple[int, int]] = []
        self._late_ns = round(domain.late_s[0] * 1e9), round(domain.late_s[1] * 1e9)
        self._last: tuple[int, float] | None = None
        self._offset_j = 0.0
        self._out = False

    def add(self, begin_ns: int, end_ns: int, energy_j: float) -> None:
        """Add a reading made between two moments (nanoseconds). It is a tick only if the counter moved.

        Args:
            begin_ns: Before the reading (monotonic nanoseconds).
            end_ns: After the reading (monotonic nanoseconds).
            energy_j: Joules read.
        """
        last, self._last = self._last, (begin_ns, energy_j)
        if self._out:
            self._out_until(end_ns)
            self._out = False
        wrong = self._wrong(last, end_ns, energy_j) if last is not None else None
        if last is not None and wrong is not None:
            self._outage(last[0], end_ns, f"{self.meter}: the counter of {self.domain.name} {wrong}")
            self._offset_j += last[1] - energy_j
        elif last is None:
            # When a counter reached its first value is unknown, unless readings are always fresh.
            if self.domain.max_age_s is not None:
                self._tick(self._oldest(begin_ns), end_ns, energy_j)
        elif energy_j > last[1] or self.domain.rests:
            self._tick(max(last[0], self._oldest(begin_ns)), end_ns, energy_j)

    def _wrong(self, last: tuple[int, float], end_ns: int, energy_j: float) -> str | None:
        """Return why the counter is wrong, from its change since the previous reading, or ``None``."""
        if energy_j < last[1]:
            return f"went backwards, from {last[1]:.3f} J to {energy_j:.3f} J; it was reset or is broken"
        if self._jumped(last, end_ns, energy_j):
            return (
                f"jumped by {energy_j - last[1]:.3f} J in {(end_ns - last[0]) / 1e6:.0f} ms, of a board that "
                f"may draw {self.domain.highest_w:.0f} W"
            )
        return None

    def _jumped(self, last: tuple[int, float], end_ns: int, energy_j: float) -> bool:
        """Return whether the counter moved by more than the board can have used, allowing for its lag."""
        if self.domain.highest_w is None or not self.ticks:
            return False
        # The energy was used since the counter last moved, whatever was read in between.
        since_ns = min(last[0], self.ticks[-1].earliest_ns)
        period_s = self.domain.update_period_s or 0.0
        elapsed_s = (end_ns - since_ns) / 1e9 + JUMP_PERIODS * period_s + self.domain.smear_s
        return energy_j - last[1] > JUMP * self.domain.highest_w * elapsed_s

    def begin_outage(self, time_ns: int, reason: str) -> None:
        """Begin an outage, when a reading gives a reason instead of joules. The next joules end it."""
        if self._out:
            self._out_until(time_ns)
        else:
            self._outage(self._last[0] if self._last else time_ns, time_ns, reason)
            self._out = True

    def add_outage(self, start_ns: int, end_ns: int, reason: str) -> None:
        """Add an outage for an unread stretch whose energy is missing from later readings.

        Args:
            start_ns: Start of the stretch (monotonic nanoseconds).
            end_ns: End of the stretch (monotonic nanoseconds).
            reason: Why it was not read.
        """
        # An outage that has not ended stays the last one.
        self.outages.insert(
            len(self.outages) - self._out, Outage(start_ns - self._late_ns[1], end_ns, reason)
        )

    @property
    def reason(self) -> str | None:
        """Why joules are unavailable at present, ``None`` if they are available."""
        return self.outages[-1].reason if self._out else None

    def reason_between(self, start_ns: int, end_ns: int) -> str | None:
        """Return the reason of the first outage that touches the ticks around an interval, if any."""
        before, after = self.tick_before(start_ns), self.tick_after(end_ns + self.smear_ns)
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
        self.ticks_seen += 1

    def forget_before(self, time_ns: int) -> None:
        """Forget the ticks before a moment, except the last ones, and what disturbed them."""
        del self.ticks[: max(0, bisect_left(self.ticks, time_ns, key=_latest) - LATEST)]
        # The reader may add to the ends meanwhile. An outage that has not ended stays the last one.
        ended, late = len(self.outages) - self._out, len(self.late)
        self.outages[:ended] = [each for each in self.outages[:ended] if each.end_ns >= time_ns]
        self.late[:late] = [each for each in self.late[:late] if each[1] >= time_ns]

    def _oldest(self, begin_ns: int) -> int:
        """Return the earliest possible time of the last move of the counter before a reading."""
        if self.domain.max_age_s is not None:
            # Power is integrated up to the reading itself; how old it was is part of ``late_s``.
            return begin_ns - (0 if self.domain.integrated else round(self.domain.max_age_s * 1e9))
        period_s = self.domain.update_period_s
        return begin_ns - round(period_s * LONGEST_TICK * 1e9) if period_s else 0

    def tick_before(self, time_ns: int) -> Tick | None:
        """Return the last tick that surely came before a moment."""
        index = bisect_right(self.ticks, time_ns, key=_latest) - 1
        return self.ticks[index] if index >= 0 else None

    def tick_after(self, time_ns: int) -> Tick | None:
        """Return the first tick that surely came at or after a moment."""
        index = bisect_left(self.ticks, time_ns, key=_earliest)
        return self.ticks[index] if index < len(self.ticks) else None

    def has_ticked_after(self, time_ns: int, ticks: int = 1) -> bool:
        """Return whether this many ticks have come after a moment, or cannot come because of an outage.

        Of running averages, which must stay steady for their whole time before they count, it is the ticks
        after twice that time.
        """
        after_ns = time_ns + 2 * self.smear_ns
        return self.reason is not None or len(self.ticks_around(after_ns, ticks)[1]) >= ticks

    @property
    def shift_s(self) -> float:
        """Width of the unknown delay that all ticks have in common (seconds)."""
        at_least_s, at_most_s = self.domain.late_s
        return at_most_s - at_least_s

    def without_common_delay(self, ticks: Sequence[Tick]) -> list[Tick]:
        """Return ticks without their common unknown delay, which cancels in differences."""
        half_ns = round(self.shift_s * 1e9 / 2)
        return [
            tick._replace(earliest_ns=tick.earliest_ns + half_ns, latest_ns=tick.latest_ns - half_ns)
            for tick in ticks
        ]

    def latest_ns(self, default_ns: int) -> int:
        """Return when the counter last ticked, or the default."""
        return self.ticks[-1].latest_ns if self.ticks else default_ns

    @property
    def smear_ns(self) -> int:
        """Time after which the readings show a change of power in full (nanoseconds)."""
        return round(self.domain.smear_s * 1e9)

    def ticks_between(self, start_ns: int, end_ns: int) -> list[Tick]:
        """Return the ticks that surely came within a closed interval."""
        first = bisect_left(self.ticks, start_ns, key=_earliest)
        last = bisect_right(self.ticks, end_ns, key=_latest)
        return self.ticks[first:last]

    def ticks_around(self, time_ns: int, n: int) -> tuple[list[Tick], list[Tick]]:
        """Return up to ``n`` ticks surely before a moment and ``n`` surely after it, in time order."""
        last = bisect_right(self.ticks, time_ns, key=_latest)
        first = bisect_left(self.ticks, time_ns, key=_earliest)
        return self.ticks[max(0, last - n) : last], self.ticks[first : first + n]

    def ticks_spanning(self, start_ns: int, end_ns: int, n: int) -> list[Tick]:
        """Return all ticks from the ``n``-th surely before an interval to the ``n``-th surely after it."""
        first = bisect_right(self.ticks, start_ns, key=_latest)
        last = bisect_left(self.ticks, end_ns, key=_earliest)
        return self.ticks[max(0, first - n) : last + n]

    def latest_pause_s(self, start_ns: int, end_ns: int) -> float:
        """Return the longest stretch with an overdue reading that touches an interval (seconds)."""
        touching = [end - begin for begin, end in self.late if begin < end_ns and end > start_ns]
        return max(touching, default=0) / 1e9

    @property
    def period_s(self) -> float | None:
        """Period of the counter: the nominal one, or else the observed one."""
        return self.domain.update_period_s or self.tick_period_s

    @property
    def tick_period_s(self) -> float | None:
        """Median time between the latest observed ticks; ``None`` below three ticks."""
        if len(self.ticks) < 3:
            return None
        steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(self.ticks[-LATEST:]))
        return steps[len(steps) // 2] / 1e9


def _earliest(tick: Tick) -> int:
    return tick.earliest_ns


def _latest(tick: Tick) -> int:
    return tick.latest_ns


#: What the background reader has observed, with one series per domain. The reader extends it during a run.
Trace: TypeAlias = Sequence[Series]
