# SPDX-License-Identifier: Apache-2.0
"""When meters are read: few readings, around the ticks, within a budget. All clocks are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import fmean, median

import pytest

from pytest_llenergy.energy.schedule import (
    SHARE,
    SHARE_AT_WORK,
    Budget,
    Timetable,
)
from pytest_llenergy.energy.trace import Series, Tick

from .waves import EPOCH, MS, S, Sensor, Wave, domain

WAVE = Wave(((EPOCH - S, 100.0), (EPOCH + 100 * S, 100.0)))


def read_on_schedule(sensor: Sensor, seconds: int, max_age_s: float | None = None) -> tuple[Series, int]:
    """Read a sensor on schedule, each reading up to 0.5 ms late; return the series and the readings."""
    series, rng, readings = Series("nvml", domain(max_age_s=max_age_s)), Random(0), 0
    timetable = Timetable([series], 0.01)
    now_ns = EPOCH
    while now_ns < EPOCH + seconds * S:
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        readings += 1
        now_ns = timetable.next_ns(now_ns) + rng.randrange(MS // 2)
    return series, readings


def read_rarely(
    sensor: Sensor, seconds: int, wait_ns: int, closely_s: int = 0, period_s: float = 0.1
) -> tuple[Series, Timetable, int]:
    """Read a sensor closely at first, then rarely, then closely for two seconds. Returns those readings."""
    series, rng = Series("nvml", domain(period_s=period_s)), Random(0)
    timetable = Timetable([series], 0.01)
    now_ns, readings = EPOCH, 0
    rarely_ns, closely_ns = EPOCH + closely_s * S, EPOCH + (closely_s + seconds) * S
    while now_ns < closely_ns + 2 * S:
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        due_ns = timetable.next_ns(now_ns)
        rarely = rarely_ns <= now_ns < closely_ns
        readings += now_ns >= closely_ns
        now_ns = (max(due_ns, now_ns + wait_ns) if rarely else due_ns) + rng.randrange(MS // 2)
    return series, timetable, readings


def ticks_with_truth(series: Series, sensor: Sensor) -> list[tuple[Tick, int]]:
    """Each tick with the moment at which the sensor ticked."""
    moments = {int(energy_j * 1000) / 1000: moment_ns for moment_ns, energy_j in sensor._ticks}
    return [(tick, moments[tick.energy_j]) for tick in series.ticks]


class TestTimetable:
    def test_a_regular_counter_needs_few_readings_to_locate_ticks_within_three_milliseconds(self) -> None:
        series, readings = read_on_schedule(Sensor(WAVE, 100 * MS), 20)
        assert len(series.ticks) == 199
        assert readings < 5 * len(series.ticks)
        assert median(tick.gap_s for tick in series.ticks[20:]) < 0.003

    def test_a_counter_with_jitter_is_read_over_a_wider_stretch(self) -> None:
        series, readings = read_on_schedule(Sensor(WAVE, 100 * MS, jitter_ns=12 * MS), 20)
        assert readings < 8 * len(series.ticks)
        assert median(tick.gap_s for tick in series.ticks[20:]) < 0.008

    def test_a_continuous_counter_is_read_evenly(self) -> None:
        series, readings = read_on_schedule(Sensor(WAVE, 0), 2, max_age_s=0.001)
        assert 180 <= readings <= 201
        assert len(series.ticks) == readings

    def test_a_counter_that_stops_ticking_is_still_read(self) -> None:
        stopping = Wave(((EPOCH - S, 100.0), (EPOCH + 2 * S, 0.0), (EPOCH + 100 * S, 0.0)))
        series, readings = read_on_schedule(Sensor(stopping, 100 * MS), 10)
        assert len(series.ticks) <= 21
        assert readings > 600

    @pytest.mark.parametrize("wait_ms", [20, 50, 90])
    @pytest.mark.parametrize("jitter_ms", [0, 4])
    def test_ticks_are_found_again_after_postponed_readings(self, wait_ms: int, jitter_ms: int) -> None:
        sensor = Sensor(WAVE, 100 * MS, jitter_ns=jitter_ms * MS)
        series, _, readings = read_rarely(sensor, 30, wait_ms * MS, closely_s=3)
        after = [tick for tick in series.ticks if tick.earliest_ns > EPOCH + 33 * S]
        assert len(after) >= 18
        # The first ones may come before the first reading near them. With jitter it may learn anew.
        assert max(tick.gap_s for tick in after[2:]) < 0.009
        assert median(tick.gap_s for tick in after) < (0.006 if jitter_ms else 0.003)
        assert readings < 120

    def test_a_counter_with_postponed_readings_is_still_read_at_every_tick(self) -> None:
        series, timetable, _ = read_rarely(Sensor(WAVE, 100 * MS), 10, 90 * MS)
        assert timetable.longest_ns < 100 * MS
        assert len([tick for tick in series.ticks if tick.latest_ns < EPOCH + 10 * S]) >= 98

    @pytest.mark.parametrize("latch_ms", [99.7, 100, 101])
    @pytest.mark.parametrize("jitter_ms", [0, 2, 4])
    @pytest.mark.parametrize("wait_ms", [90, 160, 437, 960])
    def test_predicted_ticks_of_a_rarely_read_counter_contain_the_truth(
        self, wait_ms: int, jitter_ms: int, latch_ms: float
    ) -> None:
        """This includes skipped ticks and a period that differs slightly from the nominal one."""
        sensor = Sensor(WAVE, round(latch_ms * MS), jitter_ns=jitter_ms * MS)
        series, _, _ = read_rarely(sensor, 7, wait_ms * MS, closely_s=3)
        rarely = [
            (tick, moment_ns)
            for tick, moment_ns in ticks_with_truth(series, sensor)
            if tick.earliest_ns > EPOCH + 3.2 * S and tick.latest_ns < EPOCH + 10 * S
        ]
        assert len(rarely) >= 5
        for tick, moment_ns in rarely:
            assert tick.earliest_ns <= moment_ns <= tick.latest_ns
        assert median(tick.gap_s for tick, _ in rarely) < 0.05

    def test_a_tick_that_came_early_or_was_read_late_is_narrowed(self) -> None:
        """The reader oversleeps next to some ticks, and others come before the first reading near them."""
        sensor = Sensor(WAVE, 100 * MS, jitter_ns=5 * MS)
        series, rng = Series("nvml", domain(period_s=0.1)), Random(0)
        timetable, now_ns = Timetable([series], 0.01), EPOCH
        while now_ns < EPOCH + 60 * S:
            series.add(now_ns, now_ns, sensor.counter_j(now_ns))
            now_ns = timetable.next_ns(now_ns) + rng.randrange(40 * MS if rng.random() < 0.1 else MS // 2)
        errors_s = [
            (tick.time_ns - moment_ns) / S
            for tick, moment_ns in ticks_with_truth(series, sensor)
            if tick.earliest_ns > EPOCH + 3 * S
        ]
        assert abs(fmean(errors_s)) < 0.0004
        assert max(map(abs, errors_s)) < 0.02

    def test_ticks_of_a_counter_never_read_closely_are_not_narrowed(self) -> None:
        sensor = Sensor(WAVE, 100 * MS)
        series, _, _ = read_rarely(sensor, 3, 90 * MS)
        early = [tick for tick in series.ticks if tick.latest_ns < EPOCH + 3 * S]
        assert all(tick.gap_s >= 0.09 for tick in early)


@contextmanager
def at_work(budget: Budget) -> Iterator[None]:
    budget.begin_work()
    yield
    budget.end_work()


def share_of_core(
    budget: Budget, cost_ns: int, wanted_ns: int, seconds: float, longest_ns: float = S
) -> float:
    """Return the share of a core used by wake-ups of ``cost_ns`` requested every ``wanted_ns``."""
    now_ns, woken_ns, spent_ns = 0, 0, 0
    while now_ns < seconds * S:
        spent_ns += cost_ns
        budget.charge(cost_ns, now_ns - woken_ns)
        woken_ns = now_ns
        now_ns += max(wanted_ns, budget.wait_ns(longest_ns))
    return spent_ns / now_ns


class TestBudget:
    def test_a_reader_below_its_share_is_never_postponed(self) -> None:
        assert share_of_core(Budget(), 50_000, 10 * MS, 20) == pytest.approx(0.005, rel=0.01)

    @pytest.mark.parametrize("cost_ns", [50_000, 200_000, 800_000])
    def test_a_reader_above_its_share_is_held_to_it(self, cost_ns: int) -> None:
        assert share_of_core(Budget(), cost_ns, MS, 60) == pytest.approx(SHARE, rel=0.02)

    @pytest.mark.parametrize("cost_ns", [50_000, 200_000])
    def test_the_share_is_smaller_during_work(self, cost_ns: int) -> None:
        budget = Budget()
        with at_work(budget):
            assert share_of_core(budget, cost_ns, MS, 60) == pytest.approx(SHARE_AT_WORK, rel=0.02)
        assert share_of_core(budget, cost_ns, MS, 60) == pytest.approx(SHARE, rel=0.02)

    @pytest.mark.parametrize(("busy", "wake_ups"), [(False, 1000), (True, 143)])
    def test_what_a_busy_process_loses_to_a_wake_up_is_charged(self, busy: bool, wake_ups: int) -> None:
        """A quarter of a percent of 20 s: 50 µs for each wake-up, and what it disturbs."""
        budget, now_ns, count = Budget(), 0, 0
        with at_work(budget):
            while now_ns < 20 * S:
                elapsed_ns = max(MS, budget.wait_ns(S))
                now_ns += elapsed_ns
                budget.charge(50_000, elapsed_ns, busy=busy)
                count += 1
        assert count == pytest.approx(wake_ups, rel=0.02)

    @pytest.mark.parametrize("working", [False, True])
    def test_no_reading_is_postponed_beyond_the_limit(self, working: bool) -> None:
        budget = Budget()
        with ExitStack() as stack:
            if working:
                stack.enter_context(at_work(budget))
            budget.charge(50 * MS, 0)
            assert budget.wait_ns(90 * MS) == 90 * MS

    def test_one_slow_reading_does_not_postpone_all_later_ones(self) -> None:
        budget = Budget()
        with at_work(budget):
            budget.charge(20 * MS, 2 * S)
            budget.charge(0, S)
            assert budget.wait_ns(S) == 0
