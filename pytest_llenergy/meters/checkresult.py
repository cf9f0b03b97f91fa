# SPDX-License-Identifier: Apache-2.0
"""What the self-check of a board found."""

from __future__ import annotations

from pytest_llenergy.model.record import Data

#: The largest difference from integrated power that the gains of two sensors explain (nvml.GAIN_LIMIT).
DISAGREEMENT = 0.05


class CheckResult(Data, frozen=True):
    """What was found. ``reason`` says why the counter must not be used; ``None`` where it may.

    - ``period_s``: typical time between ticks; ``jitter_s``: median absolute deviation from it;
      ``longest_s``: the longest time between two ticks. The last two include the time between polls.
    - ``still_s``: the longest time for which the counter was seen not to move; ``None`` without a counter.
    - ``continuous``: the counter moved between any two polls, so ``period_s`` is only an upper limit.
    - ``ratio``: counter over integrated power; ``doubt``: what sampling left open of it, as a share of the
      energy. Both ``None`` where the power was not told.
    - ``power_period_s``: typical time between changes of the power reading; ``None`` below three changes.
    - ``power_changes``: how many there were.
    - ``power_continuous``: it changed between any two polls.
    - ``mean_w``: mean of the power readings.
    """

    duration_s: float
    ticks: int = 0
    period_s: float | None = None
    jitter_s: float | None = None
    longest_s: float | None = None
    still_s: float | None = None
    continuous: bool = False
    ratio: float | None = None
    doubt: float | None = None
    power_period_s: float | None = None
    power_changes: int = 0
    power_continuous: bool = False
    mean_w: float | None = None
    reason: str | None = None
