# SPDX-License-Identifier: Apache-2.0
"""Warm-up ends when the duration has settled or at a cap; its timing sets the length of rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.measure.warmup import (
    CRITERION,
    GIVEN,
    MAX_BLOCKS,
    WarmUp,
    calibrate_iterations,
    required_round_s,
    warm_up,
)
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import EPOCH, MS, S, Sensor, Wave, domain, read_at
from .marks import ReadBefore, iteration, rank_of


@dataclass
class Timed:
    """Work with given durations (milliseconds per iteration) that takes no real time."""

    durations_ms: Iterator[float]
    done: list[int] = field(default_factory=list)

    def prepare_round(self) -> None:
        """Do nothing."""

    def work(self, iterations: int = 1) -> None:
        self.done.append(iterations)
        length_ns = round(next(self.durations_ms) * iterations * MS)
        self._rank = rank_of(iteration(EPOCH, EPOCH + length_ns, repeats=iterations))

    def timeline(self) -> Timeline:
        return Timeline(ranks=(self._rank,))


def run_warm_up(
    durations_ms: list[float], given: int | None = None, budget_s: float = 60.0
) -> tuple[Timed, WarmUp]:
    endless = [*durations_ms, *[durations_ms[-1]] * 20] if durations_ms else []
    workload = Timed(iter(endless))
    return workload, warm_up(workload, given, budget_s, [ReadBefore([])])


def test_warm_up_ends_once_two_iterations_in_a_row_agree() -> None:
    workload, found = run_warm_up([900, 300, 210, 205])
    assert workload.done == [1, 1, 1, 1]
    assert (found.iterations, found.settled, found.criterion) == (4, True, CRITERION)
    assert found.iteration_s == pytest.approx(0.205)


def test_the_warm_up_of_work_that_never_settles_ends_at_the_cap() -> None:
    workload, found = run_warm_up([100.0 * 1.1**index for index in range(12)])
    assert (found.iterations, found.settled) == (MAX_BLOCKS, False)
    assert len(workload.done) == MAX_BLOCKS


def test_the_warm_up_of_long_work_ends_with_half_of_the_budget() -> None:
    _, found = run_warm_up([6000, 6000, 6000], budget_s=10.0)
    assert (found.iterations, found.settled) == (1, False)


def test_short_work_is_repeated_until_it_can_be_timed() -> None:
    workload, found = run_warm_up([0.1])
    assert workload.done[0] == 1
    assert workload.done[-1] * 0.1 >= 50
    assert workload.done[-1] == workload.done[-2]
    assert found.settled is True
    assert found.iteration_s == pytest.approx(1e-4)


def test_a_given_number_of_warm_up_iterations_is_used() -> None:
    workload, found = run_warm_up([900, 300, 210], given=2)
    assert workload.done == [1, 1]
    assert (found.iterations, found.settled, found.criterion) == (2, None, GIVEN)
    assert found.iteration_s == pytest.approx(0.3)


def test_without_warm_up_rounds_have_one_iteration() -> None:
    _, found = run_warm_up([], given=0)
    assert found.iteration_s is None
    assert calibrate_iterations(found, 6, 0.1, 0.02, 20.0, [ReadBefore([])]) == 1


class TestCalibration:
    """Idle power 100 W, busy 500 W; the counter ticks every 100 ms and is read every millisecond."""

    IDLE = Wave(((EPOCH - S, 100.0), (EPOCH + 5 * S, 100.0)))

    def series(self, coverage: float = 1.0, read_ns: int = MS) -> Series:
        meter_domain = domain(coverage=coverage, period_s=0.1)
        return read_at(Sensor(self.IDLE, 100 * MS), range(EPOCH, EPOCH + 2 * S, read_ns), meter_domain)

    def required_s(self, series: Series, target: float, rounds: int = 6) -> float:
        return required_round_s(series, EPOCH, EPOCH + 2 * S, 500.0, rounds, target)

    def test_a_sensor_that_sees_everything_needs_three_ticks(self) -> None:
        assert self.required_s(self.series(), 0.02) == pytest.approx(0.3)

    def test_a_part_time_sensor_needs_rounds_long_enough_for_its_blind_time(self) -> None:
        # (1-f) T dP / sqrt(6) = 12.2 J; half of 1 % of 500 W, over six rounds.
        expected_s = 0.075 * 400 / 6**0.5 / (500 * 0.005 * 6**0.5)
        assert self.required_s(self.series(0.25), 0.01) == pytest.approx(expected_s, rel=0.01)

    def test_a_rarely_read_counter_needs_longer_rounds(self) -> None:
        blurred = self.series(read_ns=50 * MS)
        # Two ticks, each known within 50 ms, at 100 W.
        expected_s = 2 * 100 * 0.05 / 12**0.5 / (500 * 0.001 * 6**0.5)
        assert self.required_s(blurred, 0.002) == pytest.approx(expected_s, rel=0.01)

    @pytest.mark.parametrize(
        ("phases_s", "rounds", "iterations"),
        [
            ((0.04, 0.16), 6, 4),
            ((0.04, 0.16), 10, 2),
            ((0.19,), 4, 5),
            ((0.2,), 6, 2),
            ((), 6, 2),
            # Too short to have an energy, however often it is repeated.
            ((0.0, 0.004, 0.2), 6, 2),
            ((0.004, 0.15), 6, 4),
        ],
    )
    def test_a_phase_shorter_than_two_ticks_is_repeated_twenty_times(
        self, phases_s: tuple[float, ...], rounds: int, iterations: int
    ) -> None:
        hosts = [ReadBefore([self.series()])]
        # Three ticks take 0.3 s.
        warmed_up = WarmUp(5, True, CRITERION, 0.2, 500.0, phases_s)
        assert calibrate_iterations(warmed_up, rounds, 0.0, 0.02, 60.0, hosts) == iterations

    def test_repetitions_of_a_short_phase_stay_within_the_budget(self) -> None:
        hosts = [ReadBefore([self.series()])]
        warmed_up = WarmUp(5, True, CRITERION, 1.0, 500.0, (0.04,))
        assert calibrate_iterations(warmed_up, 5, 0.0, 0.02, 10.0, hosts) == 2

    def test_more_rounds_may_be_shorter(self) -> None:
        part_time = self.series(0.25)
        ratio = self.required_s(part_time, 0.005) / self.required_s(part_time, 0.005, rounds=24)
        assert ratio == pytest.approx(2)
