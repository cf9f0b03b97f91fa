# SPDX-License-Identifier: Apache-2.0
"""Warm-up ends when the duration has settled or at a cap; its timing sets the length of rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pytest_llenergy.measure.host_meters import DomainFacts
from pytest_llenergy.measure.warmup import (
    CRITERION,
    GIVEN,
    MAX_BLOCKS,
    WarmUp,
    choose_iterations,
    warm_up,
)
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import EPOCH, MS
from .marks import ReadBefore, iteration, rank_of
from .plans import round_plan


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
    plan = round_plan(warmup=given, budget_s=budget_s)
    return workload, warm_up(workload, plan, [ReadBefore([])])


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
    assert chosen(found) == 1


def chosen(
    warmup: WarmUp, rounds: int = 6, target: float = 0.02, budget_s: float = 60.0, coverage: float = 1.0
) -> int:
    """Return the iterations of a round with a counter that ticks every 100 ms."""
    gpu = DomainFacts("gpu:A", "measured", 0.1, True, False, 0.0, coverage)
    plan = round_plan(rounds=rounds, target=target)
    return choose_iterations(warmup, plan, 0.0, budget_s, [gpu])


class TestIterations:
    MILLISECOND = WarmUp(100, True, CRITERION, 0.001)

    def test_a_sensor_that_sees_everything_needs_three_ticks(self) -> None:
        assert chosen(self.MILLISECOND) == 300

    def test_a_part_time_sensor_needs_rounds_long_enough_for_its_blind_time(self) -> None:
        # (1-f) T P / sqrt(6), and half of 1 % of P, over six rounds.
        assert chosen(self.MILLISECOND, target=0.01, coverage=0.25) == 2500
        # More rounds may be shorter, and all stay within the budget.
        assert chosen(self.MILLISECOND, 24, 0.01, coverage=0.25) == 1250
        assert chosen(self.MILLISECOND, target=0.01, budget_s=6.0, coverage=0.25) == 1000

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
        # Three ticks take 0.3 s.
        assert chosen(WarmUp(5, True, CRITERION, 0.2, phases_s), rounds) == iterations

    def test_repetitions_of_a_short_phase_stay_within_the_budget(self) -> None:
        assert chosen(WarmUp(5, True, CRITERION, 1.0, (0.04,)), 5, budget_s=10.0) == 2
