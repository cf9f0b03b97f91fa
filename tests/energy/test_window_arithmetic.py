# SPDX-License-Identifier: Apache-2.0
"""Coverage of the stated uncertainty, on random windows of exactly known energy."""

from __future__ import annotations

from random import Random

import pytest

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window_arithmetic import coverage_variance

from .cases import KINDS, Kind, draw, summarise
from .waves import EPOCH, MS, S, domain

#: Windows of each kind; benchmarks/plugin/coverage simulates thousands.
WINDOWS = 250


SLOW = pytest.mark.slow


def is_slow(kind: Kind) -> bool:
    """Return whether a kind is left to slow runs: those of eight boards."""
    return kind.boards > 1


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=str(kind), marks=SLOW if is_slow(kind) else ()) for kind in KINDS]
)
def test_two_standard_uncertainties_cover_the_truth_and_are_not_inflated(kind: Kind) -> None:
    rng = Random(str(kind))
    # Simulating a reader of eight boards takes eight times as long.
    windows = WINDOWS if kind.boards == 1 else WINDOWS // 2
    found = summarise([draw(rng, kind) for _ in range(windows)])
    # Most windows must be resolvable. If each reading of eight boards waits for the interpreter's lock,
    # hardly any window below a tenth of a second is.
    assert found.resolved >= (0.5 if kind.same_process else 0.65) * windows
    assert found.covered >= 0.95
    # A window alone does not show how power changes at its edges. Under load, the uncertainty of integrated
    # power is larger than necessary.
    least = 0.2 if kind.quiet else 0.14
    assert found.fullness > (0.09 if kind.integrated else least)


@pytest.mark.slow
def test_the_error_is_far_below_that_of_reading_the_counter_at_both_ends() -> None:
    rng = Random(0)
    found = summarise([draw(rng, KINDS[0]) for _ in range(WINDOWS)])
    assert found.naive_error > 10 * found.error


TICK = 100 * MS


def read_every_nth_tick(n: int) -> Series:
    """Return a series of power that changes at each tick, with only every n-th tick observed."""
    rng, energy_j = Random(5), 0.0
    series = Series("nvml", domain(period_s=0.1, coverage=0.25, highest_w=700.0))
    for index in range(400):
        energy_j += rng.uniform(200, 400) * 0.1
        if index % n == 0:
            moment = EPOCH + index * TICK
            series.add(moment, moment, energy_j)
            # Narrow the tick to one millisecond, as the timetable does.
            if series.ticks:
                series.ticks[-1] = series.ticks[-1]._replace(earliest_ns=moment - MS)
    return series


@pytest.mark.parametrize("n", [2, 4, 8])
def test_skipped_ticks_leave_the_coverage_variance_almost_unchanged(n: int) -> None:
    every, some = (
        coverage_variance(read_every_nth_tick(each), EPOCH + 2 * S, EPOCH + 38 * S, None, None)
        for each in (1, n)
    )
    assert every is not None
    assert some is not None
    assert some / every == pytest.approx(1, rel=0.5)


def test_power_that_changed_before_the_window_is_no_step_at_its_edge() -> None:
    """Power was low until 200 ms before the window, and has been that of the window since."""
    series = Series("nvml", domain(period_s=0.1, coverage=0.25, highest_w=700.0))
    energy_j = 0.0
    for index in range(80):
        energy_j += 10.0 if index <= 38 else 50.0
        series.add(EPOCH + index * TICK, EPOCH + index * TICK, energy_j)
    variance = coverage_variance(series, EPOCH + 4 * S, EPOCH + 6 * S, None, None)
    assert variance == pytest.approx(0.0, abs=1e-9)
