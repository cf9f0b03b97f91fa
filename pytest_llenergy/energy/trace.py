# SPDX-License-Identifier: Apache-2.0
"""The trace of the meters: for each domain, the moments at which its counter ticked, with the joules."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from pytest_llenergy.energy.meters.base import Domain

#: A counter of known period has ticked within this many periods before any reading, however long ago the
#: previous reading was.
LONGEST_TICK = 1.5

#: Latest ticks from which the period of a counter is computed.
LATEST = 256

#: A counter is wrong if it moves by more energy than ``JUMP`` times the highest power gives in the elapsed
#: time, or in one period if that is longer. Limits hold on average only: an H200 of 700 W draws 860 W for a
#: tick when work begins, and 960 W for 25 ms.
JUMP = 1.5

#: The highest power (W) where the meter states none: more than a rack draws.
MOST_W = 100_000.0

#: A counter that went back returns by a move of at least that energy within this time (nanoseconds), or later
#: at this many times the highest power so far. It may have gone up within this time before.
GLITCH_NS, RETURNS = 1_000_000_000, 10.0

#: A counter that stood still for more than this many periods, while it was read, has missed a tick.
STALL_PERIODS = 1.5

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

    def watts_since(self, other: Tick) -> float:
        """Return the mean power (W) since an earlier tick."""
        return (self.energy_j - other.energy_j) / max((self.time_ns - other.time_ns) / 1e9, 1e-9)


class Mark(NamedTuple):
    """The start or end of a window (monotonic nanoseconds) with its name, where power may have changed."""

    time_ns: int
    begins: bool
    name: str = ""


class Outage(NamedTuple):
    """A stretch in which a domain could not be read or its counter was wrong, with the reason."""

    start_ns: int
    end_ns: int
    reason: str


class Series:
    """The ticks of one domain in time order.

    Joules never fall, even over an ``Outage``, so that windows between outages stay correct; a window that
    touches an outage has no result. ``late`` holds the stretches in which a reading was overdue, ``stalls``
    those in which the counter was, although it was read.
    """

    def __init__(self, meter: str, domain: Domain) -> None:
        self.meter = meter
        self.domain = domain
        self.ticks: list[Tick] = []
        #: Number of ticks so far, with those that were forgotten.
        self.ticks_seen: int = 0
        self.outages: list[Outage] = []
        self.late: list[tuple[int, int]] = []
        self.stalls: list[tuple[int, int]] = []
        #: What ``joint_solution`` keeps of stretches that it has solved.
        self.stretches: dict[Hashable, Any] = {}
        self._late_ns = round(domain.late_s[0] * 1e9), round(domain.late_s[1] * 1e9)
        self._last: tuple[int, float] | None = None
        self._offset_j = 0.0
        self._out = False
        # When the present value was first read; when the counter last went back, and by how much.
        self._moved_ns = 0
        self._fell = 0, math.inf
        # Highest power of a tick so far.
        self._highest_w = 0.0
        # ``tick_period_s``, and for how many ticks it was computed.
        self._period = -1, 0.0

    def add(self, begin_ns: int, end_ns: int, energy_j: float) -> None:
        """Add a reading made between two moments (nanoseconds). It is a tick only if the counter moved."""
        last, self._last = self._last, (begin_ns, energy_j)
        if self._out:
            self._out_until(end_ns)
            self._out = False
        wrong = self._wrong(last, end_ns, energy_j) if last is not None else None
        if last is not None and wrong is not None:
            fall_j, lately = last[1] - energy_j, pairwise(self.ticks_between(end_ns - GLITCH_NS, end_ns))
            # It may have gone up by as much before.
            rises_ns = [a.earliest_ns for a, b in lately if b.energy_j - a.energy_j >= fall_j > 0]
            reason = f"{self.meter}: the counter of {self.domain.name} {wrong}"
            self._outage(min([last[0], *rises_ns]), end_ns, reason)
            self._offset_j += fall_j
        elif last is None:
            # When a counter reached its first value is unknown, unless readings are always fresh.
            if self.domain.max_age_s is not None:
                self._tick(self._oldest(begin_ns), end_ns, energy_j)
        elif energy_j > last[1] or self.domain.rests:
            stood_s = (last[0] - self._moved_ns) / 1e9
            if self._ticks_in_time and stood_s > STALL_PERIODS * (self.domain.update_period_s or math.inf):
                self.stalls.append((self._moved_ns, last[0]))
            self._tick(max(last[0], self._oldest(begin_ns)), end_ns, energy_j)
        if last is None or energy_j != last[1]:
            self._moved_ns = end_ns

    def _wrong(self, last: tuple[int, float], end_ns: int, energy_j: float) -> str | None:
        """Return why the counter is wrong, from its change since the previous reading, or ``None``."""
        if energy_j < last[1]:
            self._fell = end_ns, last[1] - energy_j
            return f"went backwards, from {last[1]:.3f} J to {energy_j:.3f} J; it was reset or is broken"
        if energy_j == last[1] or not self.ticks:
            return None
        # The energy was used since the counter last moved, whatever was read in between.
        moved_j, since_ns = energy_j - last[1], min(last[0], self.ticks[-1].earliest_ns)
        elapsed_s = max((end_ns - since_ns) / 1e9, self.domain.update_period_s or 0.0) + self.smear_s
        most_w = self.domain.highest_w or MOST_W
        if moved_j > JUMP * most_w * elapsed_s:
            jumped = f"jumped by {moved_j:.3f} J in {(end_ns - last[0]) / 1e6:.0f} ms"
            return f"{jumped}, of a device that may draw {most_w:.0f} W"
        fell_ns, fell_j = self._fell
        if moved_j >= fell_j and (
            end_ns - fell_ns < GLITCH_NS or moved_j > RETURNS * self._highest_w * elapsed_s
        ):
            return f"moved by {moved_j:.3f} J, after it had gone back by {fell_j:.3f} J"
        return None

    @property
    def _ticks_in_time(self) -> bool:
        """Whether the counter moves at times of its own, by all the energy since it last moved."""
        return self.domain.max_age_s is None and not self.domain.integrated and not self.domain.rests

    def begin_outage(self, time_ns: int, reason: str) -> None:
        """Begin an outage, when a reading gives a reason instead of joules. The next joules end it."""
        if self._out:
            self._out_until(time_ns)
        else:
            self._outage(self._last[0] if self._last else time_ns, time_ns, reason)
            self._out = True

    def add_outage(self, start_ns: int, end_ns: int, reason: str) -> None:
        """Add an outage for an unread stretch whose energy is missing from later readings."""
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

    def stale_j(self, start_ns: int, end_ns: int) -> float:
        """Return by how much energy readings may be off that stood still around an interval.

        A counter that stood still is compared with the higher power on either side; its first tick after that
        may come out of turn, so it counts together with the next one.
        """
        watch, around_ns = self.domain.watch, round((self.period_s or 0.0) * 1e9)
        off_j = watch.stale_j(start_ns, end_ns) if watch is not None else 0.0
        for stood_ns, moved_ns in self.stalls:
            before, after = self.ticks_around(stood_ns, 2)[0], self.ticks_around(moved_ns, 3)[1]
            if before and after and stood_ns < end_ns + around_ns and moved_ns > start_ns - around_ns:
                powers_w = [b.watts_since(a) for side in (before, after[1:]) for a, b in pairwise(side)]
                # Before the tick after the next, anything up to the highest power may be missing.
                usual_w, back = (max(powers_w), after[1]) if len(after) > 2 else (self._highest_w, after[0])
                missing_w = usual_w - back.watts_since(before[-1])
                off_j += max(0.0, missing_w) * (back.time_ns - before[-1].time_ns) / 1e9
        return off_j

    def _out_until(self, end_ns: int) -> None:
        self.outages[-1] = self.outages[-1]._replace(end_ns=end_ns)

    def _outage(self, start_ns: int, end_ns: int, reason: str) -> None:
        self.outages.append(Outage(start_ns - self._late_ns[1], end_ns, reason))

    def _tick(self, earliest_ns: int, latest_ns: int, energy_j: float) -> None:
        at_least_ns, at_most_ns = self._late_ns
        earliest_ns, latest_ns = earliest_ns - at_most_ns, latest_ns - at_least_ns
        tick = Tick(earliest_ns, latest_ns, energy_j + self._offset_j)
        if self.ticks:
            self._highest_w = max(self._highest_w, tick.watts_since(self.ticks[-1]))
        self.ticks.append(tick)
        self.ticks_seen += 1

    def forget_before(self, time_ns: int) -> None:
        """Forget the ticks before a moment, except the last ones, and what disturbed them."""
        del self.ticks[: max(0, bisect_left(self.ticks, time_ns, key=_latest) - LATEST)]
        if self.domain.watch is not None:
            self.domain.watch.forget_before(time_ns)
        # The reader may add to the ends meanwhile. An outage that has not ended stays the last one.
        ended, late, stalls = len(self.outages) - self._out, len(self.late), len(self.stalls)
        self.outages[:ended] = [each for each in self.outages[:ended] if each.end_ns >= time_ns]
        self.late[:late] = [each for each in self.late[:late] if each[1] >= time_ns]
        self.stalls[:stalls] = [each for each in self.stalls[:stalls] if each[1] >= time_ns]

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
    def smear_s(self) -> float:
        """The longest time until the readings show a change of power in full (seconds)."""
        watch = self.domain.watch
        return 0.0 if watch is not None and watch.averages is False else self.domain.smear_s

    @property
    def smear_ns(self) -> int:
        """``smear_s`` in nanoseconds."""
        return round(self.smear_s * 1e9)

    def taken_as(self, *, averages: bool) -> Series:
        """Return the same ticks, taken as those of running averages or of plain readings."""
        domain = self.domain._replace(smear_s=self.domain.smear_s if averages else 0.0, watch=None)
        taken = Series(self.meter, domain)
        vars(taken).update(vars(self), domain=domain)
        return taken

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
        return _longest_s(self.late, start_ns, end_ns)

    def latest_stall_s(self, start_ns: int, end_ns: int) -> float:
        """Return the longest stretch with an overdue tick that touches an interval (seconds)."""
        return _longest_s(self.stalls, start_ns, end_ns)

    @property
    def period_s(self) -> float | None:
        """Period of the counter: the nominal one, or else the observed one."""
        return self.domain.update_period_s or self.tick_period_s

    @property
    def tick_period_s(self) -> float | None:
        """Median time between the latest observed ticks; ``None`` below three ticks."""
        if len(self.ticks) < 3:
            return None
        seen, period_s = self._period
        if seen != self.ticks_seen:
            seen, moments = self.ticks_seen, [tick.time_ns for tick in self.ticks[-LATEST:]]
            steps = sorted(b - a for a, b in pairwise(moments))
            period_s = steps[len(steps) // 2] / 1e9
            self._period = seen, period_s
        return period_s


def _longest_s(stretches: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> float:
    touching = [end - begin for begin, end in stretches if begin < end_ns and end > start_ns]
    return max(touching, default=0) / 1e9


def _earliest(tick: Tick) -> int:
    return tick.earliest_ns


def _latest(tick: Tick) -> int:
    return tick.latest_ns


#: What the background reader has observed, with one series per domain. The reader extends it during a run.
Trace: TypeAlias = Sequence[Series]
