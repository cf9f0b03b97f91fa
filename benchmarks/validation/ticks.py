# SPDX-License-Identifier: Apache-2.0
"""When a value that is read again and again changes: period and jitter of a sensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: A gap of so many periods has a tick in it that did not show, because the value was the same.
MISSED = 1.5


@dataclass(frozen=True)
class Timing:
    """Ticks of one value, in seconds. ``pause_s`` is the time between two looks: nothing is known to better.

    ``jitter_s`` is the standard deviation of the gaps between ticks that have no missed tick in them;
    ``missed`` is how many have. ``late95_s`` is by what 95 % of the gaps are off at most.
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
        """For JSON."""
        return asdict(self)


def changes(time_ns: Any, values: Any) -> tuple[Any, Any]:
    """The moment of each change (the middle between the two looks, ns) and the place of the second look."""
    import numpy as np

    at = np.flatnonzero(np.diff(values) != 0) + 1
    return (time_ns[at - 1] + time_ns[at]) // 2, at


def timing(time_ns: Any, values: Any) -> Timing:
    """Of a value that was read at these times; ``nan`` throughout gives no tick."""
    import numpy as np

    pause_s = float(np.median(np.diff(time_ns))) / 1e9 if len(time_ns) > 1 else float("nan")
    if len(values) < 2 or np.isnan(values).any():
        return Timing(0, pause_s)
    moments, _ = changes(time_ns, values)
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
