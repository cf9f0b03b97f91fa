# SPDX-License-Identifier: Apache-2.0
"""Stages: who is measured again, what is final, what is refused, and how often it is wrong."""

from __future__ import annotations

from dataclasses import replace
from math import exp, nan
from random import Random

import pytest

from pytest_llenergy.compare.metrics import Direction
from pytest_llenergy.compare.stages import (
    DEFAULT_STAGES,
    SHARP_STAGES,
    StageResult,
    Stages,
    decide_stage,
    parse_pairs,
    rule_for_change,
    rule_for_unchanged,
)
from pytest_llenergy.compare.statistics import Rule, Sample
from pytest_llenergy.errors import PlanError

CALM = (100.0, 101.0, 99.0, 100.5, 99.5, 100.2)


def times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


def sample(rounds: int, factor: float = 1.0) -> Sample:
    return Sample(times((CALM * 10)[:rounds], factor))


def course(policy: Stages, base: tuple[float, ...], head: tuple[float, ...]) -> tuple[StageResult, int]:
    """The last step, and the pairs that it took."""
    for stage in range(1, len(policy.stages) + 1):
        pairs = policy.pairs_after(stage)
        step = decide_stage(Sample(base[:pairs]), Sample(head[:pairs]), stage, policy)
        if step.done:
            return step, pairs
    raise AssertionError("the last stage is not final")


def test_what_is_unchanged_is_done_after_the_first_stage() -> None:
    step = decide_stage(sample(6), sample(6), 1)
    assert (step.estimate.verdict, step.more, step.done) == ("unchanged", 0, True)


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_change_is_measured_again_before_it_is_one(factor: float) -> None:
    step = decide_stage(sample(6), sample(6, factor), 1)
    assert (step.estimate.verdict, step.more) == ("inconclusive", 6)
    assert "after 6 pairs, not confirmed yet: 10.0%, surely more than" in step.estimate.reason
    final = decide_stage(sample(12), sample(12, factor), 2)
    assert (final.estimate.verdict, final.more) == ("regressed" if factor > 1 else "improved", 0)


def test_an_alarm_that_does_not_come_again_is_none() -> None:
    base = Sample(CALM * 2)
    head = Sample(tuple(1.06 * value for value in CALM) + tuple(0.97 * value for value in CALM))
    assert decide_stage(Sample(base.values[:6]), Sample(head.values[:6]), 1).more == 6
    assert decide_stage(base, head, 2).estimate.verdict not in ("regressed", "improved")


def test_one_stage_is_final_at_once() -> None:
    step = decide_stage(sample(12), sample(12, 1.1), 1, Stages((12,)))
    assert (step.estimate.verdict, step.more) == ("regressed", 0)


def test_what_has_no_ratio_is_not_measured_again() -> None:
    step = decide_stage(sample(6), Sample((*CALM[:5], nan)), 1)
    assert (step.estimate.verdict, step.more) == ("invalid", 0)


def test_a_drifting_level_may_settle() -> None:
    climbing = Sample(tuple(100.0 * 1.02**i for i in range(6)))
    step = decide_stage(climbing, climbing, 1)
    assert (step.estimate.verdict, step.more) == ("invalid", 6)


def test_too_few_valid_rounds_get_another_stage() -> None:
    step = decide_stage(sample(3), sample(3), 1)
    assert (step.estimate.verdict, step.more) == ("invalid", 6)


@pytest.mark.parametrize("better", ["less", "more"])
def test_what_only_the_meters_cannot_tell_is_not_measured_again(better: Direction) -> None:
    vague = Sample(sample(6).values, (2.0,) * 6)
    step = decide_stage(vague, vague, 1, better=better)
    assert (step.estimate.verdict, step.more) == ("inconclusive", 0)
    assert step.estimate.reason == "the meters cannot tell changes below 5.8%"
    worse = Sample(times(vague.values, 1.1 if better == "less" else 1 / 1.1), (2.0,) * 6)
    assert decide_stage(vague, worse, 1, better=better).more == 6


@pytest.mark.parametrize("stage", [0, 3])
def test_a_stage_that_the_policy_does_not_have(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"there is no stage {stage} of 6\+6"):
        decide_stage(sample(6), sample(6), stage)


@pytest.mark.parametrize("better", ["less", "more"])
def test_swapped_sides_take_as_long_to_be_changed(better: Direction) -> None:
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


@pytest.mark.parametrize("policy", [Stages((12,)), DEFAULT_STAGES, SHARP_STAGES, Stages((4, 4, 4, 4, 4))])
def test_all_looks_together_spend_alpha_and_no_more(policy: Stages) -> None:
    rule = Rule(alpha=0.05)
    stages = range(1, len(policy.stages) + 1)
    changes = [
        looked.alpha for stage in stages if (looked := rule_for_change(stage, policy, rule)) is not None
    ]
    assert sum(changes) == pytest.approx(0.05)
    assert changes == sorted(changes)
    assert len(changes) == max(1, len(policy.stages) - 1)
    assert rule_for_unchanged(policy, rule).alpha * len(policy.stages) == pytest.approx(0.05)


def test_sharp_policies_look_for_the_threshold_itself() -> None:
    rule = Rule(threshold=0.03, floor=0.01, tolerance=0.05)
    assert rule_for_unchanged(SHARP_STAGES, rule).tolerance == 0.03
    assert rule_for_unchanged(DEFAULT_STAGES, rule).tolerance == 0.05
    last, coarse = rule_for_change(4, SHARP_STAGES, rule), rule_for_change(2, DEFAULT_STAGES, rule)
    assert last is not None
    assert coarse is not None
    assert last.threshold == pytest.approx(0.02)
    assert coarse.threshold == 0.03
    loud = rule_for_change(4, SHARP_STAGES, replace(rule, floor=0.06))
    assert loud is not None
    assert loud.threshold == 0.03


@pytest.mark.parametrize(
    ("text", "stages"), [("6+6", (6, 6)), ("12", (12,)), (" 6 + 6 + 18 ", (6, 6, 18)), ("4+1", (4, 1))]
)
def test_pairs(text: str, stages: tuple[int, ...]) -> None:
    policy = parse_pairs(text)
    assert policy.stages == stages
    assert parse_pairs(str(policy)) == policy
    assert [policy.pairs_after(i + 1) for i in range(len(stages))] == [
        sum(stages[: i + 1]) for i in range(len(stages))
    ]


@pytest.mark.parametrize("text", ["", "6+", "+6", "six", "6.5", "-6", "6,6", "6++6", "66666"])
def test_what_are_no_pairs(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_pairs(text)
    assert str(caught.value) == f"pairs {text!r} are no numbers of pairs, such as '6+6' or '12'"


@pytest.mark.parametrize("text", ["3", "3+6", "6+0", "0"])
def test_pairs_that_begin_with_too_few(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_pairs(text)
    assert str(caught.value) == (
        f"pairs {text!r} begin with fewer than 4 or add none: write such as '6+6' or '12'"
    )


def rounds(random: Random, noise: float, factor: float = 1.0) -> tuple[float, ...]:
    """As many as the longest policy takes; one in twenty too high by about five times the noise."""
    return tuple(
        factor * exp(random.gauss(0, noise) + random.expovariate(1 / (5 * noise)) * (random.random() < 0.05))
        for _ in range(36)
    )


@pytest.mark.parametrize("policy", [DEFAULT_STAGES, SHARP_STAGES], ids=str)
def test_suites_of_the_same_are_never_red_and_cost_little(policy: Stages) -> None:
    random = Random(2)
    taken = 0
    for _ in range(6 * 50):
        step, pairs = course(policy, rounds(random, 0.01), rounds(random, 0.01))
        assert step.estimate.verdict == "unchanged"
        taken += pairs
    assert taken / 300 < 8


@pytest.mark.parametrize("policy", [DEFAULT_STAGES, SHARP_STAGES], ids=str)
@pytest.mark.parametrize(("factor", "expected"), [(1.05, "regressed"), (1 / 1.05, "improved")])
def test_five_percent_are_found(policy: Stages, factor: float, expected: str) -> None:
    random = Random(3)
    for _ in range(100):
        step, _ = course(policy, rounds(random, 0.01), rounds(random, 0.01, factor))
        assert step.estimate.verdict == expected


def test_the_threshold_itself_is_found_by_a_sharp_policy_and_by_chance_otherwise() -> None:
    random = Random(4)
    found = {DEFAULT_STAGES: 0, SHARP_STAGES: 0}
    for _ in range(200):
        base, head = rounds(random, 0.02), rounds(random, 0.02, 1.03)
        for policy in found:
            found[policy] += course(policy, base, head)[0].estimate.verdict == "regressed"
    assert found[SHARP_STAGES] > 170
    assert 60 < found[DEFAULT_STAGES] < 140


def test_a_stage_that_is_a_sliver_of_the_whole_spends_nothing() -> None:
    policy = Stages((6, 6, 2000))
    assert decide_stage(sample(12), sample(12, 2.0), 2, policy).more == 2000
