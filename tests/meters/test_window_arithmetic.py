# SPDX-License-Identifier: Apache-2.0
"""Is the uncertainty true? Random windows with an energy known to the last bit."""

from __future__ import annotations

from random import Random

import pytest

from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.window_arithmetic import coverage_variance

from .cases import KINDS, Kind, draw, summarise
from .waves import EPOCH, MS, S, domain

#: Of each kind; the benchmark under benchmarks/plugin/coverage takes thousands.
WINDOWS = 250


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_truth_lies_within_two_standard_uncertainties_that_are_not_padded(kind: Kind) -> None:
    rng = Random(str(kind))
    # A reader of eight boards takes eight times as long to follow.
    windows = WINDOWS if kind.boards == 1 else WINDOWS // 2
    found = summarise([draw(rng, kind) for _ in range(windows)])
    # Windows that drown in their uncertainty have no number; they must not be the rule. Where each reading
    # of eight boards waits for the interpreter's lock, hardly one below a tenth of a second has any.
    assert found.resolved >= (0.5 if kind.beside else 0.65) * windows
    assert found.covered >= 0.95
    # Under load, how power went between two refreshes is known less well for integrated power than need be.
    assert found.fullness > (0.1 if kind.integrated else 0.2)


def test_reading_the_counter_at_both_ends_is_much_worse() -> None:
    rng = Random(0)
    found = summarise([draw(rng, KINDS[0]) for _ in range(WINDOWS)])
    assert found.naive_error > 10 * found.error


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
