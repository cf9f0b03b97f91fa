# SPDX-License-Identifier: Apache-2.0
"""For how long does a sensor look? Told by a load that is on and off at known times.

At each tick a sensor says the mean power over the last W seconds, perhaps some time L ago. The load was on
for a known share of that time, and if W and L are right, power is a straight line over that share. W and L
are those for which it is one best. The ticks of a counter say a mean power too: what it has counted since the
tick before, over that time. A sensor that looks all the time has W of a tick's period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Windows that are tried: from 1 ms to 1.6 s, each so many times longer than the one before.
SHORTEST_S, LONGEST_S, STEP = 0.001, 1.6, 1.03

#: Lags that are tried (seconds): up to this in coarse steps, then so far around the best in fine ones.
LONGEST_LAG_S, COARSE_LAG_S = 0.3, 0.005
AROUND_LAG_S, FINE_LAG_S = 0.008, 0.001

#: Ticks below which nothing is fitted, and ticks that are enough: of more a random choice is taken.
FEWEST, MOST = 24, 300

#: Windows whose misfit is larger than the least by this share over the square root of the ticks do as well.
AS_GOOD = 4.0


@dataclass(frozen=True)
class Look:
    """How a sensor looks. ``r2`` is the share of the variance of its ticks that this explains.

    ``low_s`` and ``high_s`` are the windows that explain it about as well. ``idle_w`` and ``busy_w`` are what
    it says with the load off and on throughout.
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
        """For JSON."""
        return asdict(self)

    def coverage(self, period_s: float) -> float:
        """The share of the time in which it looks, at most 1."""
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
        """The share of the ``window_s`` before each moment (seconds from the start) in which it was on."""
        import numpy as np

        until = np.interp(end_s, self._edges_s, self._spent_s)
        return (until - np.interp(end_s - window_s, self._edges_s, self._spent_s)) / window_s


def powers_of_counter(time_ns: Any, counter_j: Any) -> tuple[Any, Any]:
    """From each tick of a counter to the next: the moment of the second (ns), and the mean power (W)."""
    import numpy as np

    from .ticks import changes

    moments, at = changes(time_ns, counter_j)
    return moments[1:], np.diff(counter_j[at]) / (np.diff(moments) / 1e9)


def powers_of_reading(time_ns: Any, watts: Any) -> tuple[Any, Any]:
    """Each change of a power reading: its moment (ns), and the power from then on (W)."""
    from .ticks import changes

    moments, at = changes(time_ns, watts)
    return moments, watts[at]


def fit(wave: Wave, moments_ns: Any, powers_w: Any, from_ns: int | None = None) -> Look | None:
    """How the sensor looked whose ticks said these powers; ``None`` where they are few or all the same.

    Ticks before ``from_ns`` are left out, by default those before the load was on for the first time.
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
    return Look(
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
    """The share of the ticks' variance that each window (rows) with each lag (columns) explains."""
    import numpy as np

    ends = seconds[:, None] - lags[None, :]
    centred = powers - powers.mean()
    explained = np.zeros((len(windows), len(lags)))
    for row, window_s in enumerate(windows):
        shares = wave.share(ends, window_s)
        shares = shares - shares.mean(axis=0)
        norm = (shares**2).sum(axis=0) * (centred**2).sum()
        # Power does not fall when the load is on.
        along = np.maximum(centred @ shares, 0.0)
        explained[row] = np.divide(along**2, norm, out=np.zeros(len(lags)), where=norm > 0)
    return explained


def scatter(wave: Wave, moments_ns: Any, look: Look, window_s: float) -> float | None:
    """The standard deviation (W) that ticks at these moments would have with a window of another length."""
    if len(moments_ns) < 2:
        return None
    shares = wave.share((moments_ns - wave.start_ns) / 1e9 - look.lag_s, window_s)
    return float((look.busy_w - look.idle_w) * shares.std(ddof=1))
