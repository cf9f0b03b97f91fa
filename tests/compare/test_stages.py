# SPDX-License-Identifier: Apache-2.0
"""Stages: when a test is measured again, when a verdict is final, and how often it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, nan
from random import Random

import pytest

from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.stages import (
    DEFAULT_STAGES,
    StageResult,
    Stages,
    decide_stage,
    parse_pairs,
    rule_for_change,
    rule_for_unchanged,
)
from pytest_llenergy.compare.statistics import Sample
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import Direction

#: Stages that find changes clearly above the threshold, and others that find it exactly.
SHORT_STAGES, SHARP_STAGES = Stages((6, 6)), Stages((6, 6, 12, 12))

CALM = (100.0, 101.0, 99.0, 100.5, 99.5, 100.2)


def times(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


def sample(rounds: int, factor: float = 1.0) -> Sample:
    return Sample(times((CALM * 10)[:rounds], factor))


def run_stages(stages: Stages, base: tuple[float, ...], head: tuple[float, ...]) -> tuple[StageResult, int]:
    """Return the final result and the pairs that it took."""
    for stage in range(1, len(stages.pairs) + 1):
        pairs = stages.pairs_after(stage)
        step = decide_stage(Sample(base[:pairs]), Sample(head[:pairs]), stage, stages)
        if step.done:
            return step, pairs
    raise AssertionError("the last stage is not final")


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_change_after_the_first_stage_is_confirmed_by_the_second(factor: float) -> None:
    step = decide_stage(sample(6), sample(6, factor), 1, SHORT_STAGES)
    change = f"{factor - 1:+.1%}"
    assert (step.estimate.verdict, step.done) == ("inconclusive", False)
    assert f"after 6 pairs, not yet confirmed: {change}, at least " in step.estimate.reason
    final = decide_stage(sample(12), sample(12, factor), 2, SHORT_STAGES)
    assert (final.estimate.verdict, final.done) == ("regressed" if factor > 1 else "improved", True)


def test_invalid_values_are_not_measured_again() -> None:
    step = decide_stage(sample(6), Sample((*CALM[:5], nan)), 1)
    assert (step.estimate.verdict, step.done) == ("invalid", True)


def test_drift_that_pairs_share_does_not_matter() -> None:
    climbing = tuple(100.0 * 1.02**i for i in range(12))
    pairs = tuple(range(12))
    for factor, expected in ((1.0, "unchanged"), (1.04, "regressed")):
        step = decide_stage(
            Sample(climbing, pairs=pairs), Sample(times(climbing, factor), pairs=pairs), 4, DEFAULT_STAGES
        )
        assert step.estimate.verdict == expected
        alone = decide_stage(Sample(climbing), Sample(times(climbing, factor)), 4, DEFAULT_STAGES)
        assert alone.estimate.verdict == "inconclusive"


@pytest.mark.parametrize("better", ["less", "more"])
def test_verdict_limited_by_the_meters_is_not_measured_again(better: Direction) -> None:
    vague = Sample(sample(6).values, shared=(2.0,) * 6)
    step = decide_stage(vague, vague, 1, SHORT_STAGES, better=better)
    assert (step.estimate.verdict, step.done) == ("inconclusive", True)
    assert step.estimate.reason == "changes below 5.8% cannot be resolved"
    worse = Sample(times(vague.values, 1.1 if better == "less" else 1 / 1.1), shared=(2.0,) * 6)
    assert decide_stage(vague, worse, 1, SHORT_STAGES, better=better).done is False


@pytest.mark.parametrize("better", ["less", "more"])
def test_swapping_baseline_and_head_mirrors_each_stage(better: Direction) -> None:
    random = Random(1)
    changed = 0
    for _ in range(100):
        base = tuple(100 * exp(random.gauss(0, 0.02)) for _ in range(36))
        head = tuple(104 * exp(random.gauss(0, 0.02)) for _ in range(36))
        for stage in (2, 3, 4):
            pairs = SHARP_STAGES.pairs_after(stage)
            one, other = Sample(base[:pairs]), Sample(head[:pairs])
            there = decide_stage(one, other, stage, SHARP_STAGES, better=better)
            back = decide_stage(other, one, stage, SHARP_STAGES, better=better)
            verdicts = {there.estimate.verdict, back.estimate.verdict}
            assert len(verdicts & {"regressed", "improved"}) in (0, 2)
            changed += "regressed" in verdicts
    assert changed > 100


@pytest.mark.parametrize(
    "stages", [Stages((12,)), SHORT_STAGES, DEFAULT_STAGES, SHARP_STAGES, Stages((4, 4, 4, 4, 4))], ids=str
)
def test_all_stages_together_spend_at_most_alpha(stages: Stages) -> None:
    rule = Rule(alpha=0.05)
    rules = [rule_for_change(stage, stages, rule) for stage in range(1, len(stages.pairs) + 1)]
    changes = [each.alpha for each in rules if each is not None]
    assert 0.0475 < sum(changes) <= 0.05 * (1 + 1e-12)
    per_pair = [alpha / more for alpha, more in zip(changes, stages.pairs[-len(changes) :], strict=True)]
    assert per_pair == sorted(per_pair)
    assert len(changes) == max(1, len(stages.pairs) - 1)
    assert rule_for_unchanged(stages, rule).alpha * len(stages.pairs) == pytest.approx(0.05)


def test_sharp_stages_look_for_changes_of_the_threshold() -> None:
    rule = Rule(threshold=0.03, floor=0.01, tolerance=0.05)
    assert rule_for_unchanged(SHARP_STAGES, rule).tolerance == 0.03
    assert rule_for_unchanged(SHORT_STAGES, rule).tolerance == 0.05
    last, coarse = rule_for_change(4, SHARP_STAGES, rule), rule_for_change(2, SHORT_STAGES, rule)
    assert last is not None
    assert coarse is not None
    assert last.threshold == pytest.approx(0.02)
    assert coarse.threshold == 0.03
    loud = rule_for_change(4, SHARP_STAGES, replace(rule, floor=0.06))
    assert loud is not None
    assert loud.threshold == 0.03


@pytest.mark.parametrize(
    ("text", "pairs"), [("6+6", (6, 6)), ("12", (12,)), (" 6 + 6 + 18 ", (6, 6, 18)), ("4+1", (4, 1))]
)
def test_pairs_are_parsed(text: str, pairs: tuple[int, ...]) -> None:
    stages = parse_pairs(text)
    assert stages.pairs == pairs
    assert parse_pairs(str(stages)) == stages
    assert [stages.pairs_after(i + 1) for i in range(len(pairs))] == list(accumulate(pairs))


@pytest.mark.parametrize("text", ["", "6+", "+6", "six", "6.5", "-6", "6,6", "6++6", "66666"])
def test_malformed_pairs_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_pairs(text)
    assert str(caught.value) == (
        f"invalid pairs {text!r}; expected the pairs of each stage, such as '6+6' or '12'"
    )


def rounds(random: Random, noise: float, factor: float = 1.0) -> tuple[float, ...]:
    """Return 40 rounds; one in twenty is too high by about five times the noise."""
    return tuple(
        factor * exp(random.gauss(0, noise) + random.expovariate(1 / (5 * noise)) * (random.random() < 0.05))
        for _ in range(40)
    )


@pytest.mark.parametrize("stages", [SHORT_STAGES, DEFAULT_STAGES, SHARP_STAGES], ids=str)
def test_suites_without_changes_raise_no_alarm_and_take_few_pairs(stages: Stages) -> None:
    random = Random(2)
    taken = 0
    for _ in range(6 * 50):
        step, pairs = run_stages(stages, rounds(random, 0.01), rounds(random, 0.01))
        assert step.estimate.verdict == "unchanged"
        taken += pairs
    assert taken / 300 < 8


@pytest.mark.parametrize("stages", [SHORT_STAGES, DEFAULT_STAGES, SHARP_STAGES], ids=str)
@pytest.mark.parametrize(("factor", "expected"), [(1.05, "regressed"), (1 / 1.05, "improved")])
def test_change_of_five_percent_is_found(stages: Stages, factor: float, expected: str) -> None:
    random = Random(3)
    for _ in range(100):
        step, _ = run_stages(stages, rounds(random, 0.01), rounds(random, 0.01, factor))
        assert step.estimate.verdict == expected


def test_change_of_the_threshold_is_found_by_sharp_stages_and_by_chance_otherwise() -> None:
    random = Random(4)
    found = {SHORT_STAGES: 0, DEFAULT_STAGES: 0, SHARP_STAGES: 0}
    for _ in range(200):
        base, head = rounds(random, 0.02), rounds(random, 0.02, 1.03)
        for stages in found:
            found[stages] += run_stages(stages, base, head)[0].estimate.verdict == "regressed"
    assert found[DEFAULT_STAGES] > 180
    assert found[SHARP_STAGES] > 170
    assert 60 < found[SHORT_STAGES] < 140
