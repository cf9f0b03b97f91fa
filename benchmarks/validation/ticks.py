# SPDX-License-Identifier: Apache-2.0
"""Period and jitter of a sensor, from the times at which its polled value changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: A gap of this many periods contains a tick that went unnoticed because the value was the same.
MISSED = 1.5


@dataclass(frozen=True)
class Timing:
    """Ticks of one value, in seconds. ``pause_s`` is the time between two polls, which limits the resolution.

    ``jitter_s`` is the standard deviation of the gaps without a missed tick; ``missed`` is the number of gaps
    with one. ``late95_s`` bounds the deviation of 95 % of the gaps.
    """

    ticks: int
    pause_s: float
    period_s: float | None = None
    jitter_s: float | None = None
    late95_s: float | None = None
    shortest_s: float | None = None
    longest_s: float | None = None
    missed: int = 0

    @property
    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON primitives."""
        return asdict(self)


def find_changes(time_ns: Any, values: Any) -> tuple[Any, Any]:
    """Return the time of each change (midway between the two polls, ns) and the index of the second poll."""
    import numpy as np

    at = np.flatnonzero(np.diff(values) != 0) + 1
    return (time_ns[at - 1] + time_ns[at]) // 2, at


def measure_timing(time_ns: Any, values: Any) -> Timing:
    """Return the timing of a value polled at these times; all ``nan`` gives no tick."""
    import numpy as np

    pause_s = float(np.median(np.diff(time_ns))) / 1e9 if len(time_ns) > 1 else float("nan")
    if len(values) < 2 or np.isnan(values).any():
        return Timing(0, pause_s)
    moments, _ = find_changes(time_ns, values)
    if len(moments) < 4:
        return Timing(len(moments), pause_s)
    gaps_s = np.diff(moments) / 1e9
    whole = gaps_s[gaps_s < MISSED * np.median(gaps_s)]
    period_s = float(whole.mean())
    return Timing(
        ticks=len(moments),
        pause_s=pause_s,
        period_s=period_s,
        jitter_s=float(whole.std(ddof=1)) if len(whole) > 1 else None,
        late95_s=float(np.quantile(np.abs(whole - period_s), 0.95)),
        shortest_s=float(gaps_s.min()),
        longest_s=float(gaps_s.max()),
        missed=int((gaps_s >= MISSED * np.median(gaps_s)).sum()),
    )
