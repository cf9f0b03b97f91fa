# SPDX-License-Identifier: Apache-2.0
"""Dithering: rounds start at phases spread over the tick of the counter."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from pytest_llenergy.energy.trace import Series, Tick
from pytest_llenergy.measure.rounds import (
    PhaseDither,
    required_strata,
    slowest_series,
    tick_phase,
    tick_reference,
)

from ..energy.waves import EPOCH, MS, domain

PERIOD_NS = 80 * MS


@dataclass
class Clock:
    """Replaces the module ``real_time``; sleeping takes exactly as long as requested."""

    now_ns: int = EPOCH

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("pytest_llenergy.measure.rounds.real_time", made)
    return made


def ticked(*gaps_ms: int, known: bool = True) -> Series:
    """Return a counter that ticked every 80 ms until now; each tick is known within its gap."""
    series = Series("nvml", domain(period_s=PERIOD_NS / 1e9 if known else None))
    for index, gap_ms in enumerate(gaps_ms):
        last_ns = EPOCH + (index + 1 - len(gaps_ms)) * PERIOD_NS
        # The wider the gap, the further its middle lies after the tick.
        series.ticks.append(Tick(last_ns, last_ns + gap_ms * MS, float(index)))
    return series


def starts(clock: Clock, series: Series, rounds: int, strata: int = 6, seed: int = 0) -> list[float]:
    """Return the phases at which ``rounds`` rounds of 23 ms start."""
    dither, phases = PhaseDither(strata, seed), []
    for _ in range(rounds):
        dither.wait(tick_reference([series]))
        phases.append((clock.now_ns - EPOCH) / PERIOD_NS % 1)
        clock.now_ns += 23 * MS
    return phases


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("strata", [1, 2, 6, 16])
def test_one_round_starts_in_each_stratum_of_the_tick(clock: Clock, strata: int, known: bool) -> None:
    series = ticked(0, 0, 0, 0, known=known)
    for seed in range(50):
        phases = starts(clock, series, strata, strata, seed)
        assert sorted(int(phase * strata) for phase in phases) == list(range(strata))


def test_further_rounds_visit_every_stratum_again(clock: Clock) -> None:
    phases = starts(clock, ticked(0, 0, 0, 0), 18)
    for first in (0, 6, 12):
        assert {int(phase * 6) for phase in phases[first : first + 6]} == set(range(6))


def test_the_strata_are_visited_in_random_order(clock: Clock) -> None:
    orders = {tuple(int(phase * 6) for phase in starts(clock, ticked(0, 0, 0), 6, seed=s)) for s in range(50)}
    assert len(orders) > 40


def test_starts_are_spread_within_their_stratum(clock: Clock) -> None:
    within = [phase * 6 % 1 for s in range(50) for phase in starts(clock, ticked(0, 0, 0), 6, seed=s)]
    assert all(sum(place <= each < place + 0.25 for each in within) > 40 for place in (0, 0.25, 0.5, 0.75))


def test_an_older_precise_tick_is_preferred_to_a_newer_vague_one(clock: Clock) -> None:
    series = ticked(0, 0, 0, 70)
    phases = starts(clock, series, 6)
    assert sorted(int(phase * 6) for phase in phases) == list(range(6))
    assert tick_phase([series], EPOCH + 110 * MS) == pytest.approx(30 / 80)


def test_the_newest_of_equally_precise_ticks_is_used() -> None:
    series = ticked(2, 2, 2, 2, known=False)
    series.ticks.append(Tick(EPOCH + 90 * MS, EPOCH + 92 * MS, 9.0))
    assert tick_phase([series], EPOCH + 131 * MS) == pytest.approx(40 / 80)


def test_the_slowest_ticking_counter_sets_the_phase() -> None:
    fast, slow = Series("a", domain(period_s=0.02)), Series("b", domain(period_s=0.1))
    smooth = Series("c", domain(period_s=0.5, max_age_s=0.5))
    far = Series("d", domain(period_s=10.0))
    assert slowest_series([fast, slow, smooth, far]) is slow
    assert slowest_series([smooth]) is None


@pytest.mark.parametrize("trace", [[], [Series("rapl", domain(max_age_s=0.001))]])
def test_without_ticks_there_is_no_wait(trace: list[Series], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "sleep")
    PhaseDither(6).wait(tick_reference(trace))
    assert tick_phase(trace, time.monotonic_ns()) is None


def test_a_part_time_sensor_needs_more_strata() -> None:
    assert [required_strata(share) for share in (1.0, 0.5, 0.25, 0.2)] == [1, 4, 8, 10]
