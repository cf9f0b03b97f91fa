# SPDX-License-Identifier: Apache-2.0
"""Rounds start all over a tick."""

from __future__ import annotations

import time

import pytest

from pytest_llenergy.measure.phase import PhaseDither, phase_of, slowest, strata_for
from pytest_llenergy.measure.spread import covers_tick
from pytest_llenergy.meters.trace import Series

from ..meters.waves import MS, domain

PERIOD_NS = 80 * MS


def ticked() -> Series:
    """A counter of 80 ms whose last tick was just now."""
    series, now_ns = Series("nvml", domain(period_s=PERIOD_NS / 1e9)), time.monotonic_ns()
    for index in range(5):
        moment = now_ns + (index - 4) * PERIOD_NS
        series.add(moment, moment, float(index))
    return series


def test_starts_are_spread_over_the_tick_one_in_each_stratum() -> None:
    dither, series, phases = PhaseDither(6), ticked(), []
    for _ in range(6):
        dither.wait([series])
        phases.append(phase_of([series], time.monotonic_ns()))
    assert covers_tick(phases, 0.45)


def test_they_do_not_come_in_order() -> None:
    dither, series, phases = PhaseDither(6), ticked(), []
    for _ in range(6):
        dither.wait([series])
        phases.append(phase_of([series], time.monotonic_ns()) or 0.0)
    assert phases != sorted(phases)


def test_the_slowest_counter_that_ticks_leads() -> None:
    fast, slow = Series("a", domain(period_s=0.02)), Series("b", domain(period_s=0.1))
    smooth = Series("c", domain(period_s=0.5, max_age_s=0.5))
    far = Series("d", domain(period_s=10.0))
    assert slowest([fast, slow, smooth, far]) is slow
    assert slowest([smooth]) is None


@pytest.mark.parametrize("trace", [[], [Series("rapl", domain(max_age_s=0.001))]])
def test_without_ticks_nothing_is_waited_for(trace: list[Series], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "sleep")
    PhaseDither(6).wait(trace)
    assert phase_of(trace, time.monotonic_ns()) is None


def test_a_part_time_sensor_needs_more_strata() -> None:
    assert [strata_for(share) for share in (1.0, 0.5, 0.25, 0.2)] == [1, 4, 8, 10]
