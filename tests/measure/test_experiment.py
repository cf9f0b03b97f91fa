# SPDX-License-Identifier: Apache-2.0
"""The whole measuring procedure on a meter of known power: iterations, rounds, target, budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import msgspec
import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.meters.base import Domain, Meter, within
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.round_statistics import phases_cover_tick
from pytest_llenergy.record.timeline import Timeline

from .marks import measure
from .plans import round_plan

pytestmark = pytest.mark.clock

PERIOD_S = 0.05
WATTS = 40.0


@dataclass
class Latched:
    """A board that always draws 40 W, and whose counter ticks every 50 ms."""

    name: str = "latched"
    poll_period_s: float = 0.005
    domains: tuple[Domain, ...] = (
        Domain(
            name="gpu:GPU-a",
            kind="measured",
            source="test",
            scope="board",
            resolution_j=1e-6,
            accuracy="exact",
            limits=within(0.0),
            update_period_s=PERIOD_S,
        ),
    )

    def read(self) -> list[float | str]:
        return [WATTS * PERIOD_S * (time.monotonic() // PERIOD_S)]

    def close(self) -> None:
        """Do nothing: the meter holds no resources."""


def until_undisturbed(
    measured: Callable[[], Experiment], as_planned: Callable[[Experiment], bool]
) -> Experiment:
    """Measure again, at most twice, if a stall of the machine has changed the plan."""
    for _ in range(3):
        result = measured()
        if as_planned(result):
            break
    return result


def run(seconds: float, **plan: float) -> Experiment:
    return run_on(Latched(), lambda: time.sleep(seconds), **plan)


def run_on(meter: Meter, work: Callable[[], object], **plan: Any) -> Experiment:
    return measure(CallWorkload(work), round_plan(**plan), Selection((meter,), ()), Lease(devices=("cpu",)))


def test_short_work_is_repeated_for_three_ticks_and_reported_per_iteration() -> None:
    result = until_undisturbed(lambda: run(0.01), lambda result: result.procedure.iterations >= 5)
    procedure = result.procedure
    # Sleeping takes a little longer than requested, and longer still on a busy machine.
    assert procedure.iterations >= 5
    assert {round_.iterations for round_ in result.rounds} == {procedure.iterations}
    assert all(round_.duration_s >= procedure.iterations * 0.01 for round_ in result.rounds)
    duration_s, energy = result.metrics["duration_s"].value, result.metrics["energy_j"]
    assert duration_s is not None
    assert energy.value is not None
    assert energy.uncertainty is not None
    assert duration_s >= 0.01
    assert abs(energy.value - WATTS * duration_s) <= 4 * energy.uncertainty


def test_gaps_hold_three_ticks_of_the_slowest_counter() -> None:
    for _ in range(3):
        result = run(0.2, rounds=2, warmup=0, gap_s=0.01, target=0.5)
        if all(round_.idle_power_w is not None for round_ in result.rounds):
            break
        # Retry if the machine stalled so long that no ticks were read.
    assert result.procedure.gap_s == pytest.approx(3.5 * PERIOD_S)
    for round_ in result.rounds:
        assert round_.idle_power_w is not None
        assert round_.idle_power_u_w is not None
        assert abs(round_.idle_power_w - WATTS) <= 4 * round_.idle_power_u_w


@dataclass
class InStep(CallWorkload):
    """Becomes ready exactly as the counter ticks, so that only dithering varies the phase of its rounds."""

    starts: list[float | None] = field(default_factory=list)

    def prepare_round(self) -> None:
        super().prepare_round()
        time.sleep(-time.monotonic() % PERIOD_S)

    def work(self, iterations: int = 1) -> None:
        self.starts.append(time.monotonic() / PERIOD_S % 1)
        super().work(iterations)


def test_rounds_do_not_start_in_phase_with_the_counter() -> None:
    workload = InStep(lambda: time.sleep(0.1))
    plan = round_plan(rounds=9, warmup=0, gap_s=0.1, budget_s=1.0)
    result = measure(workload, plan, Selection((Latched(),), ()), Lease(devices=("cpu",)))
    assert len(workload.starts) == len(result.rounds) == 9
    # test_rounds tests the evenness on a simulated clock. Eight random starts would lie within
    # a fifth of a tick once in ten thousand runs. The first round imports modules and starts late.
    assert phases_cover_tick(workload.starts[1:], 0.8)
    assert phases_cover_tick([round_.phase for round_ in result.rounds[1:]], 0.8)


def test_a_target_that_is_met_ends_the_rounds() -> None:
    result = until_undisturbed(
        lambda: run(0.3, warmup=1, target=0.2),
        lambda result: max(round_.duration_s for round_ in result.rounds) < 0.4,
    )
    assert len(result.rounds) == 4
    assert result.procedure.reached is not None
    assert result.procedure.reached <= 0.2
    assert "imprecise" not in {flag.name for flag in result.flags}


@dataclass
class Cut(CallWorkload):
    """Works half as long from its third round on, which it says with a flag."""

    name: str = "ended-early"
    made: int = 0

    def work(self, iterations: int = 1) -> None:
        self.function = partial(time.sleep, 0.1 if self.made < 2 else 0.05)
        super().work(iterations)

    def timeline(self) -> Timeline:
        (rank,) = super().timeline().ranks
        self.made += 1
        flags = (Flag(name=self.name, severity="warning", detail="x"),) if self.made > 2 else ()
        return Timeline(ranks=(msgspec.structs.replace(rank, flags=flags),))


@pytest.mark.parametrize("name", ["ended-early", "refused"])
def test_a_part_of_a_load_ends_the_rounds_and_counts_in_no_metric(name: str) -> None:
    plan = round_plan(rounds=4, warmup=0, iterations=1, gap_s=0.05, target=0.0001)
    workload = Cut(lambda: None, name=name)
    result = measure(workload, plan, Selection((Latched(),), ()), Lease(devices=("cpu",)))
    assert len(result.rounds) == 3
    duration = result.metrics["duration_s"]
    assert (duration.n, duration.value) == (2, fmean(each.duration_s for each in result.rounds[:2]))


def test_an_unreachable_target_ends_with_the_budget_and_an_inconclusive_flag() -> None:
    lengths = count(1)
    workload = CallWorkload(lambda: time.sleep(0.05 * (1 + next(lengths) % 3)))
    plan = round_plan(rounds=2, warmup=0, gap_s=0.05, target=0.0001, budget_s=2.5)
    result = measure(workload, plan, Selection((Latched(),), ()), Lease(devices=("cpu",)))
    assert len(result.rounds) > 2
    assert result.times is not None
    assert result.times.warmup_s + result.procedure.measuring_s >= 2.5
    (flag,) = (flag for flag in result.flags if flag.name == "imprecise")
    assert flag.severity == "warning"
    assert flag.detail == (
        f"standard uncertainty {result.procedure.reached:.1%} after {len(result.rounds)} rounds and "
        f"{result.procedure.measuring_s:.3g} s; the target is 0.01% (--energy-target or the mark "
        "energy_options), the budget 2.5 s (--energy-budget or the mark)"
    )


def test_a_single_round_ignores_the_target() -> None:
    result = run(0.1, rounds=1, warmup=1, target=0.0001, budget_s=2.0)
    assert len(result.rounds) == 1
    assert result.procedure.reached is None
    # A busy machine may keep the reader from running.
    assert [flag.name for flag in result.flags if flag.name != "doubtful"] == []


class Resting:
    """An estimate of 10 W for the CPU time of this process, which rests while nothing is computed."""

    name = "resting"
    poll_period_s = 0.05
    domains = (
        Domain(
            name="cpu:processes",
            kind="estimated",
            source="test",
            scope="this process",
            resolution_j=1e-6,
            accuracy="exact",
            limits=within(0.0),
            rests=True,
            max_age_s=1e-4,
        ),
    )

    def read(self) -> list[float | str]:
        return [10 * time.process_time()]

    def close(self) -> None:
        """Do nothing: the meter holds no resources."""


def test_an_estimate_needs_no_gaps_and_no_added_rounds() -> None:
    used_s = []

    def compute() -> None:
        start_s = time.process_time()
        while time.process_time() - start_s < 0.001:
            pass
        used_s.append(time.process_time() - start_s)

    plan = round_plan(rounds=6, target=1e-6, budget_s=60.0)
    result = measure(CallWorkload(compute), plan, Selection((Resting(),), ()), Lease(devices=("cpu",)))
    procedure = result.procedure
    assert (procedure.gap_s, procedure.budget_s, procedure.target) == (0.001, 60.0, 1e-6)
    # Four, if they took two seconds on a busy machine.
    assert 4 <= len(result.rounds) <= 6
    for round_ in result.rounds:
        # A hundred on an idle machine.
        assert round_.iterations == procedure.iterations >= 5
        assert round_.idle_power_w == 0.0
        assert round_.energy_j is not None
        assert round_.energy_u_j is not None
        assert round_.energy_u_j < 0.05 * round_.energy_j
    # Most CPU time of a round is that of the calls.
    per_call_j = result.metrics["energy_j"].value
    assert per_call_j == pytest.approx(10 * sum(used_s) / len(used_s), rel=0.1)


class TestBudget:
    """The budget includes the warm-up. Once it is spent, no round starts beyond the floor."""

    @pytest.mark.parametrize("meter", [Latched, Resting])
    @pytest.mark.parametrize("budget_s", [0.01, 1.2])
    def test_rounds_beyond_the_floor_start_within_it(
        self, meter: Callable[[], Meter], budget_s: float
    ) -> None:
        starts: list[float] = []
        warmup = 1 if budget_s < 0.5 else 2

        def work() -> None:
            starts.append(time.monotonic())
            time.sleep(0.25)

        def measured() -> Experiment:
            starts[:] = [time.monotonic()]
            return run_on(meter(), work, rounds=9, floor=3, iterations=1, target=1e-6, budget_s=budget_s)

        def in_time(result: Experiment) -> bool:
            # Opening meters and waiting for their first ticks comes before.
            return all(start_s - starts[0] < budget_s + 0.3 for start_s in starts[1 + warmup + 3 :])

        result = until_undisturbed(
            measured, lambda result: in_time(result) and result.procedure.warmup_iterations == warmup
        )
        assert result.procedure.warmup_iterations == warmup
        assert 3 <= len(result.rounds) == len(starts) - 1 - warmup < 9
        assert in_time(result)
        assert budget_s > 0.5 or len(result.rounds) == 3

    def test_given_rounds_are_made_whatever_they_take(self) -> None:
        assert len(run_on(Resting(), lambda: time.sleep(0.1), rounds=5, budget_s=0.01).rounds) == 5


class TestEstimate:
    def test_work_that_takes_seconds_has_one_warm_up_and_four_rounds(self) -> None:
        result = until_undisturbed(
            lambda: run_on(Resting(), lambda: time.sleep(0.7), rounds=6, floor=3, target=1e-6, budget_s=60.0),
            lambda result: max(round_.duration_s for round_ in result.rounds) < 0.8,
        )
        assert (result.procedure.warmup_iterations, len(result.rounds)) == (1, 4)

    def test_it_is_not_asked_for_a_target(self) -> None:
        waits = count(1)
        work = lambda: time.sleep(0.002 * (next(waits) % 9))  # noqa: E731
        result = run_on(Resting(), work, rounds=2, iterations=7, target=1e-6, budget_s=0.5)
        assert result.procedure.reached is None or result.procedure.reached > 1e-6
        assert "imprecise" not in {flag.name for flag in result.flags}


def test_the_times_add_up_to_the_whole_measurement() -> None:
    begin_s = time.monotonic()
    plan = round_plan(rounds=3, floor=3, budget_s=2.0)
    lease = Lease(devices=("cpu",))
    workload = CallWorkload(lambda: time.sleep(0.2))
    result = measure(workload, plan, Selection((Latched(),), ()), lease, load_s=1.5)
    taken_s = time.monotonic() - begin_s
    times = result.times
    assert times is not None
    assert times.load_s == 1.5
    assert times.rounds_s == pytest.approx(sum(each.duration_s for each in result.rounds))
    # Two quiet gaps a round.
    assert times.gaps_s >= 2 * len(result.rounds) * result.procedure.gap_s
    assert times.warmup_s >= 0.2 * result.procedure.warmup_iterations
    assert times.warmup_s + times.rounds_s + times.gaps_s == pytest.approx(taken_s, abs=0.3)
