# SPDX-License-Identifier: Apache-2.0
"""What a part-time sensor may have missed, where not every tick was looked at."""

from __future__ import annotations

from random import Random

import pytest

from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.window_arithmetic import coverage_variance

from .waves import EPOCH, MS, S, domain

TICK = 100 * MS


def seen_every(n: int) -> Series:
    """A power that is another at each tick, of which every n-th is looked at."""
    rng, energy_j = Random(5), 0.0
    series = Series("nvml", domain(period_s=0.1, coverage=0.25, highest_w=700.0))
    for index in range(400):
        energy_j += rng.uniform(200, 400) * 0.1
        if index % n == 0:
            moment = EPOCH + index * TICK
            series.add(moment, moment, energy_j)
            # Known to a tick, as by its timetable.
            if series.ticks:
                series.ticks[-1] = series.ticks[-1]._replace(earliest_ns=moment - MS)
    return series


@pytest.mark.parametrize("n", [2, 4, 8])
def test_power_that_scatters_is_as_uncertain_as_if_every_tick_had_been_seen(n: int) -> None:
    every, some = (
        coverage_variance(seen_every(each), EPOCH + 2 * S, EPOCH + 38 * S, None, None) for each in (1, n)
    )
    assert every is not None
    assert some is not None
    assert some / every == pytest.approx(1, rel=0.5)
