# SPDX-License-Identifier: Apache-2.0
"""The clock of another host against pytest's, from exchanges of readings. Arithmetic only.

All moments are nanoseconds of ``CLOCK_MONOTONIC``, which no administrator or NTP client can set; it only runs
faster or slower by some parts per million. An exchange bounds the offset without any assumption about the
network: the remote reading was made between the two local ones. Only between exchanges is anything assumed:
that each clock keeps its rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Largest difference between the rates of two clocks that counts as normal (parts per million). Crystals keep
#: within 50; an NTP client that corrects an error may exceed it.
DRIFT_PPM = 100


@dataclass(frozen=True)
class Exchange:
    """One reading of the remote clock between two of the local one."""

    sent_ns: int
    remote_ns: int
    received_ns: int


@dataclass(frozen=True)
class Offset:
    """Remote minus local clock at the local moment ``at_ns``; the truth lies within ``bound_ns`` of it."""

    offset_ns: int
    bound_ns: float
    at_ns: int

    @property
    def u_ns(self) -> float:
        """Standard uncertainty: any error within the bound is equally likely."""
        return self.bound_ns / math.sqrt(3)


class ClockLine:
    """The remote clock over a run: groups of exchanges, and a line between each two of them."""

    def __init__(self) -> None:
        self._points: list[Offset] = []

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        """Add a group of exchanges, later than all before. Returns the offset that it shows."""
        # The remote reading of the fastest one was made between the two local ones.
        best = min(exchanges, key=lambda exchange: exchange.received_ns - exchange.sent_ns)
        lowest, highest = best.remote_ns - best.received_ns, best.remote_ns - best.sent_ns
        middle_ns = (best.sent_ns + best.received_ns) // 2
        # Half a nanosecond is lost by rounding down.
        found = Offset((lowest + highest) // 2, (highest - lowest) / 2 + 0.5, middle_ns)
        self._points.append(found)
        return found

    def offset(self, local_ns: int) -> Offset:
        """Return the offset at a local moment, from the groups on both sides of it.

        With a group on one side only, the clocks may drift apart by ``DRIFT_PPM`` from there.

        Raises:
            IndexError: No exchange was added.
        """
        after = bisect_right(self._points, local_ns, key=lambda point: point.at_ns)
        if after in (0, len(self._points)):
            nearest = self._points[0 if after == 0 else -1]
            drift_ns = abs(local_ns - nearest.at_ns) * DRIFT_PPM / 1e6
            return Offset(nearest.offset_ns, nearest.bound_ns + drift_ns, local_ns)
        left, right = self._points[after - 1], self._points[after]
        passed_ns, span_ns = local_ns - left.at_ns, right.at_ns - left.at_ns
        # In integers: hosts that have run for years differ by more nanoseconds than a float resolves.
        offset_ns = left.offset_ns + (right.offset_ns - left.offset_ns) * passed_ns // span_ns
        weight = passed_ns / span_ns
        return Offset(offset_ns, (1 - weight) * left.bound_ns + weight * right.bound_ns, local_ns)

    def to_remote(self, local_ns: int) -> int:
        """Return the reading of the remote clock at a local moment."""
        return local_ns + self.offset(local_ns).offset_ns

    def to_local(self, remote_ns: int) -> int:
        """Return the local moment of a reading of the remote clock."""
        local_ns = remote_ns - self._points[-1].offset_ns
        # The offset changes so slowly that each step removes all but a ten-thousandth of the error.
        for _ in range(3):
            local_ns = remote_ns - self.offset(local_ns).offset_ns
        return local_ns

    def fault(self, begin_ns: int, end_ns: int) -> str | None:
        """Return why the clocks cannot be compared between two local moments, or None if they can.

        The reason continues a sentence that begins with the name of the host.
        """
        moments = [point.at_ns for point in self._points]
        first = max(0, bisect_right(moments, begin_ns) - 1)
        points = self._points[first : bisect_right(moments, end_ns) + 1]
        for left, right in pairwise(points):
            fault = _explain_change(left, right)
            if fault is not None:
                return fault
        return None


def _explain_change(left: Offset, right: Offset) -> str | None:
    moved_ns, span_ns = right.offset_ns - left.offset_ns, right.at_ns - left.at_ns
    if abs(moved_ns) <= left.bound_ns + right.bound_ns + span_ns * DRIFT_PPM / 1e6:
        return None
    return (
        f"has a clock that moved by {moved_ns / 1e6:.3g} ms against pytest's within {span_ns / 1e9:.3g} s; "
        f"at most {DRIFT_PPM} parts per million are normal"
    )
