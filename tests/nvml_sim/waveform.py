# SPDX-License-Identifier: Apache-2.0
"""The ground truth: exact integrals of the waveform, with no counter, latch or gain in between.

Written apart from the C side and in unbounded integers: milliwatts times nanoseconds are picojoules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Power from `start_ns` (CLOCK_MONOTONIC) until the next segment; `period_ns=0` means constant."""

    start_ns: int
    low_mw: int
    high_mw: int = 0
    period_ns: int = 0
    high_ns: int = 0

    def power_mw(self, at_ns: int) -> int:
        """Power in mW at an instant within the segment."""
        if self.period_ns and (at_ns - self.start_ns) % self.period_ns < self.high_ns:
            return self.high_mw
        return self.low_mw

    def energy_pj(self, start_ns: int, end_ns: int) -> int:
        """Energy in pJ between two instants within the segment."""
        high = self._high_time(end_ns) - self._high_time(start_ns)
        return high * self.high_mw + (end_ns - start_ns - high) * self.low_mw

    def _high_time(self, until_ns: int) -> int:
        if not self.period_ns:
            return 0
        periods, rest = divmod(until_ns - self.start_ns, self.period_ns)
        return periods * self.high_ns + min(rest, self.high_ns)


def power_mw(segments: Sequence[Segment], at_ns: int) -> int:
    """Power in mW at an instant; 0 before the first segment."""
    current = [segment for segment in segments if segment.start_ns <= at_ns]
    return current[-1].power_mw(at_ns) if current else 0


def energy_pj(segments: Sequence[Segment], start_ns: int, end_ns: int) -> int:
    """Energy in pJ between two instants; nothing flows before the first segment."""
    if end_ns < start_ns:
        raise ValueError(f"the window ends before it starts: {start_ns}..{end_ns}")
    total = 0
    for position, segment in enumerate(segments):
        following = segments[position + 1].start_ns if position + 1 < len(segments) else end_ns
        begin, finish = max(segment.start_ns, start_ns), min(following, end_ns)
        if begin < finish:
            total += segment.energy_pj(begin, finish)
    return total
