# SPDX-License-Identifier: Apache-2.0
"""Steps are announced as they begin, never during a measurement, with the time that remains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.round_plan import Step, next_round
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.plugin.progress import describe_step, format_duration

from ..compare.runs import round_of
from .marks import measure
from .plans import round_plan
from .test_experiment import Latched

#: Delay of a slow terminal (seconds).
DELAY_S = 0.03


@dataclass
class Listener:
    """A slow listener that records when it was called."""

    steps: list[Step] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        began_s = time.monotonic()
        time.sleep(DELAY_S)
        self.steps.append(step)
        self.spans.append((began_s, time.monotonic()))


def measure_with_listener(**plan: float | None) -> tuple[Experiment, Listener]:
    chosen = round_plan(**{"budget_s": 1.0, **plan})
    listener, workload = Listener(), CallWorkload(lambda: time.sleep(0.1))
    meters = Selection((Latched(),), ())
    return measure(workload, chosen, meters, Lease(devices=("cpu",)), listener), listener


Measurement = tuple[Experiment, Listener]


@pytest.fixture(scope="module")
def of_four_rounds() -> Measurement:
    """A measurement with two warm-up iterations and four rounds."""
    return measure_with_listener(warmup=2, target=0.9)


def test_no_step_is_announced_during_a_round_or_its_quiet_gaps(of_four_rounds: Measurement) -> None:
    result, listener = of_four_rounds
    gap_s = result.procedure.gap_s
    quiet = [(round_.start_s - gap_s, round_.start_s + round_.duration_s + gap_s) for round_ in result.rounds]
    assert len(quiet) == 4
    assert len(listener.spans) == len(quiet) + 2
    for began_s, ended_s in listener.spans:
        assert not [each for each in quiet if began_s < each[1] and ended_s > each[0]]


def test_each_step_is_announced_once_and_in_order(of_four_rounds: Measurement) -> None:
    result, listener = of_four_rounds
    steps = [(step.stage, step.number, step.of) for step in listener.steps]
    rounds = [("round", number, 4) for number in range(1, len(result.rounds) + 1)]
    assert steps == [("warm-up", 1, 2), ("warm-up", 2, 2), *rounds]


def test_an_automatic_warm_up_has_no_total_number_of_steps() -> None:
    _, listener = measure_with_listener(rounds=1)
    blocks = [step for step in listener.steps if step.stage == "warm-up"]
    assert len(blocks) >= 2
    assert [step.of for step in blocks] == [None] * len(blocks)
    assert [step.number for step in blocks] == list(range(1, len(blocks) + 1))


def test_the_remaining_time_follows_from_the_rounds_so_far(of_four_rounds: Measurement) -> None:
    result, listener = of_four_rounds
    rounds = listener.steps[2:]
    assert len(rounds) == 4
    begun_s, *each_s = (began_s for began_s, _ in listener.spans[2:])
    for done, (step, now_s) in enumerate(zip(rounds[1:], each_s, strict=True), 1):
        # Compare with the time used so far: that of the next rounds is unpredictable on a busy machine.
        assert step.left_s == pytest.approx((4 - done) * (now_s - begun_s) / done, abs=0.1)
    procedure = result.procedure
    assert rounds[0].left_s is not None
    # One iteration sleeps for a tenth of a second, or longer on a busy machine.
    assert rounds[0].left_s >= 4 * (procedure.iterations * 0.1 + 2 * procedure.gap_s)


def test_a_spent_budget_shortens_the_announced_number_of_rounds() -> None:
    """The budget allows a warm-up and six rounds of 0.1 s with gaps of 0.1 s at most."""
    result, listener = measure_with_listener(
        warmup=1, rounds=9, floor=2, iterations=1, budget_s=2.0, target=0.9
    )
    (first,) = (step for step in listener.steps if (step.stage, step.number) == ("round", 1))
    assert first.of is not None
    assert 2 <= len(result.rounds) <= first.of <= 6


LEVEL = [round_of(joules) for joules in (10.0, 10.1, 9.9, 10.0)]


@pytest.mark.parametrize(
    ("rounds", "spent_s", "left_s"),
    [
        # No round has been measured yet.
        ([], 0.0, 6 * 2.5),
        # Only the minimum number of rounds remains, each as long as the previous ones.
        (LEVEL, 8.0, 2 * 2.0),
        # From then on, all of the budget.
        (LEVEL * 2, 8.0, 12.0),
        # The last round takes a full round even if the budget is almost used up.
        (LEVEL * 2, 19.9, 19.9 / 8),
    ],
)
def test_the_remaining_time_is_that_of_the_least_rounds_then_of_the_budget(
    rounds: list[object], spent_s: float, left_s: float
) -> None:
    plan = round_plan(rounds=6, target=0.02, budget_s=21.0)
    step = next_round(rounds, plan, 1.0, spent_s, 1.0, 2.5)  # type: ignore[arg-type]
    assert step.left_s == pytest.approx(left_s)


def test_without_a_warm_up_the_first_round_has_no_remaining_time() -> None:
    assert next_round([], round_plan(), 0.0, 0.0, 1.0, None).left_s is None


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Step("warm-up", 2, 5), "warm-up 2 of 5"),
        (Step("warm-up", 3), "warm-up 3"),
        (Step("round", 1, 6), "round 1 of 6"),
        (Step("round", 3, 6, left_s=65.0), "round 3 of 6, 1 min 5 s left"),
        (Step("round", 7, 6, 0.031, 0.02, 3600.0), "round 7, u 3.1% for 2.0%, 1 h left"),
    ],
)
def test_a_step_is_described_in_words(step: Step, text: str) -> None:
    assert describe_step(step) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (61.0, "1 min 1 s"), (3600 + 120, "1 h 2 min")],
)
def test_a_duration_is_described_in_words(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
