# SPDX-License-Identifier: Apache-2.0
"""Steps are told as they begin, never while something is measured, and say how long it will take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.measure.experiment import Experiment, RoundPlan, measure
from pytest_llenergy.measure.remaining_time import Forecast, Step
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.progress import describe_step, format_duration

from ..compare.runs import round_of
from .test_experiment import Latched

#: What a slow terminal takes (seconds).
TAKES_S = 0.03


@dataclass
class Listener:
    """Takes its time, and notes when."""

    steps: list[Step] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        began_s = time.monotonic()
        time.sleep(TAKES_S)
        self.steps.append(step)
        self.spans.append((began_s, time.monotonic()))


def listened(**plan: float | None) -> tuple[Experiment, Listener]:
    chosen = RoundPlan(**{"rounds": 4, "gap_s": 0.1, "budget_s": 1.0, **plan})  # type: ignore[arg-type]
    listener, workload = Listener(), CallWorkload(lambda: time.sleep(0.1))
    meters = Selection((Latched(),), ())
    return measure(workload, chosen, meters, Lease(devices=("cpu",)), listener), listener


def test_nothing_is_told_in_a_round_or_its_quiet_gaps() -> None:
    result, listener = listened(warmup=2)
    gap_s = result.procedure.gap_s
    quiet = [(round_.start_s - gap_s, round_.start_s + round_.duration_s + gap_s) for round_ in result.rounds]
    assert len(quiet) >= 4
    assert len(listener.spans) == len(quiet) + 2
    for began_s, ended_s in listener.spans:
        assert not [each for each in quiet if began_s < each[1] and ended_s > each[0]]


def test_each_step_is_told_once_and_in_order() -> None:
    result, listener = listened(warmup=2)
    steps = [(step.stage, step.number, step.of) for step in listener.steps]
    rounds = [("round", number, 4) for number in range(1, len(result.rounds) + 1)]
    assert steps == [("warm-up", 1, 2), ("warm-up", 2, 2), *rounds]
    joules = [round_.energy_j or 0.0 for round_ in result.rounds]
    so_far = [step.energy_j for step in listener.steps[2:]]
    assert so_far == [None, *(pytest.approx(sum(joules[:n])) for n in range(1, len(joules)))]
    assert not any(step.estimated for step in listener.steps)


def test_a_warm_up_until_settled_has_no_number_to_reach() -> None:
    _, listener = listened()
    blocks = [step for step in listener.steps if step.stage == "warm-up"]
    assert len(blocks) >= 2
    assert [step.of for step in blocks] == [None] * len(blocks)
    assert [step.number for step in blocks] == list(range(1, len(blocks) + 1))


def test_the_time_that_is_left_is_what_the_rounds_before_took() -> None:
    result, listener = listened(warmup=1, target=0.9)
    rounds = listener.steps[1:]
    assert len(rounds) == 4
    begun_s, *each_s = (began_s for began_s, _ in listener.spans[1:])
    for done, (step, now_s) in enumerate(zip(rounds[1:], each_s, strict=True), 1):
        # Held against what there was: how long a busy machine will take, nobody foresees.
        assert step.left_s == pytest.approx((4 - done) * (now_s - begun_s) / done, abs=0.1)
    procedure = result.procedure
    assert rounds[0].left_s is not None
    # One iteration sleeps for a tenth of a second, or longer on a machine that is busy.
    assert rounds[0].left_s >= 4 * (procedure.iterations * 0.1 + 2 * procedure.gap_s)


LEVEL = [round_of(joules) for joules in (10.0, 10.1, 9.9, 10.0)]
SCATTERED = [round_of(joules) for joules in (10.0, 12.0, 8.0, 10.0)]


@pytest.mark.parametrize(
    ("rounds", "spent_s", "left_s"),
    [
        # Nobody has seen one yet.
        ([], 0.0, 6 * 2.5),
        # Those that there will be in any case, as long as they have been.
        (LEVEL, 8.0, 2 * 2.0),
        # Their mean is good to 8%: 2% would need sixteen times as many, and the budget is spent before.
        (SCATTERED, 8.0, 12.0),
        # One round takes what a round takes, even where the budget is spent.
        (SCATTERED * 2, 19.9, 19.9 / 8),
    ],
)
def test_further_rounds_are_foreseen_from_the_scatter(
    rounds: list[object], spent_s: float, left_s: float
) -> None:
    outlook = Forecast(least=6, target=0.02, budget_s=20.0, round_s=2.5)
    step = outlook.next_round(rounds, spent_s)  # type: ignore[arg-type]
    assert step.left_s == pytest.approx(left_s)


def test_without_a_warm_up_nobody_knows_how_long_the_first_round_takes() -> None:
    assert Forecast(6, 0.02, 20.0, None).next_round([], 0.0).left_s is None


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Step("warm-up", 2, 5), "warm-up 2 of 5"),
        (Step("warm-up", 3), "warm-up 3"),
        (Step("round", 1, 6), "round 1 of 6"),
        (Step("round", 3, 6, 4.123, left_s=65.0), "round 3 of 6, 4.12 J so far, 1 min 5 s left"),
        (Step("round", 3, 6, 4.123, estimated=True), "round 3 of 6, 4.12 J (estimated) so far"),
        (
            Step("round", 7, 6, 41.0, False, 0.031, 0.02, 3600.0),
            "round 7, u 3.1% for 2.0%, 41 J so far, 1 h left",
        ),
    ],
)
def test_a_step_in_words(step: Step, text: str) -> None:
    assert describe_step(step) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1 s"), (59.4, "59 s"), (59.6, "1 min"), (61.0, "1 min 1 s"), (3600 + 120, "1 h 2 min")],
)
def test_a_span_of_time_in_words(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
