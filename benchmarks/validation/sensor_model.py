# SPDX-License-Identifier: Apache-2.0
"""Characterise a sensor from its polled values: tick period, jitter and averaging window.

The averaging window is estimated from a load that is on and off at known times. At each tick a sensor reports
the mean power over the last W seconds, possibly delayed by L. The load was on for a known share of that
interval; with the right W and L, power is a linear function of that share. W and L are fitted for the best
line. Ticks of a counter give a mean power too: the energy since the previous tick divided by the time. A
sensor that samples all the time has W equal to the tick period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: A gap of this many periods contains a tick that went unnoticed because the value was the same.
MISSED = 1.5

#: Candidate windows: from 1 ms to 1.6 s in a geometric series.
SHORTEST_S, LONGEST_S, STEP = 0.001, 1.6, 1.03

#: Candidate lags (seconds): coarse steps up to this one, then fine steps around the best.
LONGEST_LAG_S, COARSE_LAG_S = 0.3, 0.005
AROUND_LAG_S, FINE_LAG_S = 0.008, 0.001

#: Fewest ticks for a fit, and the number above which a random subset is used.
FEWEST, MOST = 24, 300

#: Windows whose misfit exceeds the least by at most this share over sqrt(ticks) fit equally well.
AS_GOOD = 4.0


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


@dataclass(frozen=True)
class SensorModel:
    """A sensor that averages over a window, fitted; ``r2`` is the share of the ticks' variance explained.

    ``low_s`` and ``high_s`` bound the windows that fit about equally well. ``idle_w`` and ``busy_w`` are the
    fitted readings with the load off and on throughout.
    """

    ticks: int
    window_s: float
    low_s: float
    high_s: float
    lag_s: float
    r2: float
    idle_w: float
    busy_w: float

    @property
    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON primitives."""
        return asdict(self)

    def coverage(self, period_s: float) -> float:
        """Return the share of the time in which the sensor samples, at most 1."""
        return min(1.0, self.window_s / period_s)


class Wave:
    """A load that was on in these intervals (monotonic ns, in order) and off between them."""

    def __init__(self, on: Sequence[tuple[int, int]]) -> None:
        import numpy as np

        self.start_ns, self.end_ns = on[0][0], on[-1][1]
        edges_s = (np.array(on, dtype=np.int64).ravel() - self.start_ns) / 1e9
        lengths_s = np.diff(edges_s)[::2]
        self._edges_s = edges_s
        self._spent_s = np.concatenate([[0.0], np.repeat(np.cumsum(lengths_s), 2)[:-1]])

    def share(self, end_s: Any, window_s: float) -> Any:
        """Return the share of the ``window_s`` before each moment in which the load was on.

        Moments are seconds from the start of the wave.
        """
        import numpy as np

        until = np.interp(end_s, self._edges_s, self._spent_s)
        return (until - np.interp(end_s - window_s, self._edges_s, self._spent_s)) / window_s


def counter_powers(time_ns: Any, counter_j: Any) -> tuple[Any, Any]:
    """Return the time (ns) of each counter tick but the first, and the mean power (W) since the last one."""
    import numpy as np

    moments, at = find_changes(time_ns, counter_j)
    return moments[1:], np.diff(counter_j[at]) / (np.diff(moments) / 1e9)


def reading_powers(time_ns: Any, watts: Any) -> tuple[Any, Any]:
    """Return the time (ns) of each change of a power reading, and the new power (W)."""
    moments, at = find_changes(time_ns, watts)
    return moments, watts[at]


def fit_sensor(wave: Wave, moments_ns: Any, powers_w: Any, from_ns: int | None = None) -> SensorModel | None:
    """Fit window and lag to ticks with these powers; None if they are few or all equal.

    Ticks before ``from_ns`` are ignored, by default those before the load was first on.
    """
    import numpy as np

    from_ns = wave.start_ns if from_ns is None else from_ns
    inside = np.flatnonzero((moments_ns > from_ns) & (moments_ns < wave.end_ns))
    if len(inside) > MOST:
        inside = np.sort(np.random.default_rng(1).choice(inside, MOST, replace=False))
    seconds, powers = (moments_ns[inside] - wave.start_ns) / 1e9, powers_w[inside]
    if len(powers) < FEWEST or np.ptp(powers) == 0:
        return None
    windows = SHORTEST_S * STEP ** np.arange(np.log(LONGEST_S / SHORTEST_S) / np.log(STEP))
    lags = np.arange(0.0, LONGEST_LAG_S, COARSE_LAG_S)
    explained = _explained(wave, seconds, powers, windows, lags)
    middle_s = float(lags[explained.max(axis=0).argmax()])
    lags = np.arange(max(0.0, middle_s - AROUND_LAG_S), middle_s + AROUND_LAG_S, FINE_LAG_S)
    explained = _explained(wave, seconds, powers, windows, lags)
    best_row, best_lag = np.unravel_index(explained.argmax(), explained.shape)
    left = 1 - explained.max(axis=1)
    good = windows[left <= left.min() * (1 + AS_GOOD / len(powers) ** 0.5) + 1e-9]
    window_s, lag_s = float(windows[best_row]), float(lags[best_lag])
    slope, idle_w = np.polyfit(wave.share(seconds - lag_s, window_s), powers, 1)
    return SensorModel(
        ticks=len(powers),
        window_s=window_s,
        low_s=float(good.min()),
        high_s=float(good.max()),
        lag_s=lag_s,
        r2=float(explained.max()),
        idle_w=float(idle_w),
        busy_w=float(idle_w + slope),
    )


def _explained(wave: Wave, seconds: Any, powers: Any, windows: Any, lags: Any) -> Any:
    """Return the share of the ticks' variance explained by each window (rows) and lag (columns)."""
    import numpy as np

    ends = seconds[:, None] - lags[None, :]
    centred = powers - powers.mean()
    explained = np.zeros((len(windows), len(lags)))
    for row, window_s in enumerate(windows):
        shares = wave.share(ends, window_s)
        shares = shares - shares.mean(axis=0)
        norm = (shares**2).sum(axis=0) * (centred**2).sum()
        # Power does not drop when the load is on.
        along = np.maximum(centred @ shares, 0.0)
        explained[row] = np.divide(along**2, norm, out=np.zeros(len(lags)), where=norm > 0)
    return explained


def predict_scatter(wave: Wave, moments_ns: Any, model: SensorModel, window_s: float) -> float | None:
    """Return the standard deviation (W) of ticks at these moments for a window of another length."""
    if len(moments_ns) < 2:
        return None
    shares = wave.share((moments_ns - wave.start_ns) / 1e9 - model.lag_s, window_s)
    return float((model.busy_w - model.idle_w) * shares.std(ddof=1))
