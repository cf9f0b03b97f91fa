# SPDX-License-Identifier: Apache-2.0
"""Is the stated uncertainty true? Random windows whose energy is known exactly."""

from __future__ import annotations

from random import Random

import pytest

from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.window_arithmetic import coverage_variance

from .cases import KINDS, Kind, draw, summarise
from .waves import EPOCH, MS, S, domain

#: Windows of each kind; benchmarks/plugin/coverage takes thousands.
WINDOWS = 250


SLOW = pytest.mark.slow


def is_slow(kind: Kind) -> bool:
    """Of eight boards the default run takes the hardest kinds: under load in the reader's own process."""
    return kind.boards > 1 and (kind.quiet or not kind.beside)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=str(kind), marks=SLOW if is_slow(kind) else ()) for kind in KINDS]
)
def test_truth_lies_within_two_standard_uncertainties_that_are_not_padded(kind: Kind) -> None:
    rng = Random(str(kind))
    # A reader of eight boards takes eight times as long to follow.
    windows = WINDOWS if kind.boards == 1 else WINDOWS // 2
    found = summarise([draw(rng, kind) for _ in range(windows)])
    # Most windows must be resolvable. Where each reading of eight boards waits for the interpreter's lock,
    # hardly one below a tenth of a second is.
    assert found.resolved >= (0.5 if kind.beside else 0.65) * windows
    assert found.covered >= 0.95
    # Under load, the uncertainty of integrated power is larger than necessary.
    assert found.fullness > (0.1 if kind.integrated else 0.2)


def test_reading_the_counter_at_both_ends_is_much_worse() -> None:
    rng = Random(0)
    found = summarise([draw(rng, KINDS[0]) for _ in range(WINDOWS)])
    assert found.naive_error > 10 * found.error


TICK = 100 * MS


def seen_every(n: int) -> Series:
    """A power that changes at each tick, of which every n-th is observed."""
    rng, energy_j = Random(5), 0.0
    series = Series("nvml", domain(period_s=0.1, coverage=0.25, highest_w=700.0))
    for index in range(400):
        energy_j += rng.uniform(200, 400) * 0.1
        if index % n == 0:
            moment = EPOCH + index * TICK
            series.add(moment, moment, energy_j)
            # Narrowed to one tick, as by its timetable.
            if series.ticks:
                series.ticks[-1] = series.ticks[-1]._replace(earliest_ns=moment - MS)
    return series


@pytest.mark.parametrize("n", [2, 4, 8])
def test_scattering_power_is_as_uncertain_as_with_every_tick_observed(n: int) -> None:
    every, some = (
        coverage_variance(seen_every(each), EPOCH + 2 * S, EPOCH + 38 * S, None, None) for each in (1, n)
    )
    assert every is not None
    assert some is not None
    assert some / every == pytest.approx(1, rel=0.5)
