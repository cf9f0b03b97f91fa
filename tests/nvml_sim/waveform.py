# SPDX-License-Identifier: Apache-2.0
"""The ground truth: exact integrals of the waveform, with no counter, latch or gain in between.

Written independently of the C side, with unbounded integers: milliwatts times nanoseconds are picojoules.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

from .draw import draw
from .layout import DECAY_PERIODS, STEP_BURST, STEP_CONSTANT, STEP_DECAY, STEP_NOISE, STEP_RAMP

_BLOCK = 64
_extending = Lock()


class Segment(NamedTuple):
    """Power from `start_ns` (CLOCK_MONOTONIC) until the next segment, by `kind`, a `layout.STEP_*`.

    Constant: `low_mw`. Burst: `high_mw` for `high_ns` of each `period_ns`, then `low_mw`. Ramp: from
    `low_mw` to `high_mw` over `period_ns`, and `high_mw` from then on. Decay: from `low_mw` half of the way
    to `high_mw` in each of `DECAY_PERIODS` `period_ns`, and `high_mw` from then on. Noise: in each
    `period_ns` a new draw, with `seed`, from `low_mw` to `high_mw`.
    """

    start_ns: int
    low_mw: int
    high_mw: int = 0
    period_ns: int = 0
    high_ns: int = 0
    seed: int = 0
    kind: int = STEP_CONSTANT

    def power_mw(self, at_ns: int) -> int:
        """Return the power at a time within the segment, in mW rounded down."""
        spent = at_ns - self.start_ns
        if self.kind == STEP_BURST:
            return self.high_mw if spent % self.period_ns < self.high_ns else self.low_mw
        if self.kind == STEP_RAMP:
            return self.low_mw + (self.high_mw - self.low_mw) * min(spent, self.period_ns) // self.period_ns
        if self.kind == STEP_DECAY:
            halvings, rest = divmod(spent, self.period_ns)
            if halvings >= DECAY_PERIODS:
                return self.high_mw
            fall = (self.low_mw - self.high_mw) * (2 * self.period_ns - rest)
            return self.high_mw + fall // (2 * self.period_ns << halvings)
        if self.kind == STEP_NOISE:
            return _level(self.seed, self.low_mw, self.high_mw, spent // self.period_ns)
        return self.low_mw

    def energy_pj(self, until_ns: int) -> int:
        """Return the energy in pJ from the segment's start to a time within it, rounded down."""
        spent = until_ns - self.start_ns
        if self.kind == STEP_BURST:
            periods, rest = divmod(spent, self.period_ns)
            high_ns = periods * self.high_ns + min(rest, self.high_ns)
            return high_ns * self.high_mw + (spent - high_ns) * self.low_mw
        if self.kind == STEP_RAMP:
            run, hold = min(spent, self.period_ns), max(spent - self.period_ns, 0)
            triangle = (self.high_mw - self.low_mw) * run * run // (2 * self.period_ns)
            return self.low_mw * run + triangle + self.high_mw * hold
        if self.kind == STEP_DECAY:
            halvings, rest = divmod(min(spent, DECAY_PERIODS * self.period_ns), self.period_ns)
            # Three quarters of the first period, half of that in the next one, and so on.
            area = 6 * self.period_ns**2 * ((1 << halvings) - 1) + (4 * self.period_ns - rest) * rest
            above = (self.low_mw - self.high_mw) * area // (4 * self.period_ns << halvings)
            return spent * self.high_mw + above
        if self.kind == STEP_NOISE:
            periods, rest = divmod(spent, self.period_ns)
            return self._levels_before(periods) * self.period_ns + self.power_mw(until_ns) * rest
        return spent * self.low_mw

    def _levels_before(self, period: int) -> int:
        source = (self.seed, self.low_mw, self.high_mw)
        whole, rest = divmod(period, _BLOCK)
        sums = _block_sums(*source)
        with _extending:
            for block in range(len(sums) - 1, whole):
                sums.append(sums[-1] + _add_levels(*source, block * _BLOCK, _BLOCK))
        return sums[whole] + _add_levels(*source, whole * _BLOCK, rest)


def _level(seed: int, low_mw: int, high_mw: int, period: int) -> int:
    return low_mw + draw(seed, period) % (high_mw - low_mw + 1)


def _add_levels(seed: int, low_mw: int, high_mw: int, first: int, count: int) -> int:
    return sum(_level(seed, low_mw, high_mw, first + i) for i in range(count))


@lru_cache(maxsize=256)
def _block_sums(_seed: int, _low_mw: int, _high_mw: int) -> list[int]:
    # Cumulative sums of the levels before block 0, 1, 2, ..., extended on demand.
    return [0]


class Waveform:
    """Segments in time order; the power before the first is zero."""

    def __init__(self, *segments: Segment) -> None:
        self._segments: list[Segment] = []
        self._starts: list[int] = []
        self._before_pj: list[int] = []
        for segment in segments:
            self.append(segment)

    def __len__(self) -> int:
        return len(self._segments)

    def append(self, segment: Segment) -> None:
        """Append a segment after the last one."""
        self._before_pj.append(self.until_pj(segment.start_ns))
        self._segments.append(segment)
        # Extended last, because other threads search this list.
        self._starts.append(segment.start_ns)

    @property
    def start_ns(self) -> int:
        """Start of the first segment."""
        return self._starts[0]

    def power_mw(self, at_ns: int) -> int:
        """Return the power in mW at a time."""
        position = bisect_right(self._starts, at_ns) - 1
        return self._segments[position].power_mw(at_ns) if position >= 0 else 0

    def until_pj(self, end_ns: int) -> int:
        """Return the energy in pJ from the first segment's start to a time."""
        position = bisect_right(self._starts, end_ns) - 1
        if position < 0:
            return 0
        return self._before_pj[position] + self._segments[position].energy_pj(end_ns)

    def energy_pj(self, start_ns: int, end_ns: int) -> int:
        """Return the energy in pJ between two times."""
        if end_ns < start_ns:
            raise ValueError(f"the window ends before it starts: {start_ns}..{end_ns}")
        return self.until_pj(end_ns) - self.until_pj(start_ns)
