# SPDX-License-Identifier: Apache-2.0
"""Decide in stages how many pairs of rounds to measure, until the verdict is clear.

A pair is one round of the baseline and one of the head, measured next to each other in alternating order
(ABBA). After each stage a test is compared on all of its pairs: if the verdict is clear, the test is done;
otherwise it gets the pairs of the next stage. With more than one stage, the first never reports a change:
more measurements must confirm it. The stages are fixed before anything is measured: rounds are never added
until a result is significant.

Repeated decisions raise the probability of a false one, so ``alpha`` is divided among the stages. Each stage
spends the same share on calling a test unchanged. The share spent on changes grows with the pairs, following
I. K. Hwang, W. J. Shih, J. S. De Cani, "Group sequential designs using a family of type I error probability
spending functions", Stat. Med. 9 (1990): little early, so that only obvious changes end early, and most at
the last stages. The correlation between stages, which share their first pairs, is not exploited (Bonferroni's
bound).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, log, log1p

import msgspec

from pytest_llenergy.compare.rule import DEFAULT_RULE, Rule
from pytest_llenergy.compare.statistics import MIN_ROUNDS, PAIRS, Estimate, Sample, compare_samples
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import Direction

#: Lower bound for the alpha of a stage, since rounding may reduce a very small share to 0. No limit exists at
#: this alpha.
MIN_ALPHA = 1e-12

#: Parameter of the spending function; -4 is close to the boundaries of O'Brien and Fleming (Biometrics 35,
#: 1979) and finds large changes a few pairs earlier. Chosen with ``benchmarks/plugin/gate``.
SPENDING = -4.0

#: How far below the threshold an estimate may be, with stages that find changes of the threshold itself.
BELOW_THRESHOLD = 0.01


@dataclass(frozen=True)
class Stages:
    """Pairs that each stage adds.

    One or two stages find changes clearly above the threshold. They find a change of exactly the threshold in
    half of all cases, since its estimate is as often below the threshold as above. Three or more stages are
    ``sharp``.
    """

    pairs: tuple[int, ...]

    @property
    def sharp(self) -> bool:
        """Whether the stages find changes of exactly the threshold, which takes more pairs."""
        return len(self.pairs) > 2

    def pairs_after(self, stage: int) -> int:
        """Return the total number of pairs after ``stage`` stages."""
        return sum(self.pairs[:stage])

    def __str__(self) -> str:
        return "+".join(map(str, self.pairs))


#: Six pairs, and at most forty for tests that are not clear before. At 2 % noise, they find a change of +3 %
#: in 94 to 99 of 100 cases, and raise at most one false alarm in a hundred suites of 50 tests, on every
#: machine that ``benchmarks/plugin/gate`` simulates.
DEFAULT_STAGES = Stages((6, 2, 2, 2, 2, 2, 4, 4, 8, 8))


@dataclass(frozen=True)
class StageResult:
    """The estimate after a stage, and whether the verdict is final."""

    estimate: Estimate
    done: bool


def decide_stage(
    base: Sample,
    head: Sample,
    stage: int,
    stages: Stages = DEFAULT_STAGES,
    rule: Rule = DEFAULT_RULE,
    better: Direction = "less",
) -> StageResult:
    """Compare all rounds so far, after ``stage`` stages (counted from 1)."""
    last = stage == len(stages.pairs)
    change_rule = rule_for_change(stage, stages, rule)
    by_change = compare_samples(base, head, change_rule, better, PAIRS) if change_rule is not None else None
    if by_change is not None and by_change.verdict in ("regressed", "improved"):
        return StageResult(by_change, done=True)
    unchanged_rule = rule_for_unchanged(stages, rule)
    estimate = compare_samples(base, head, unchanged_rule, better, PAIRS)
    if estimate.ratio is None:
        return StageResult(estimate, done=True)
    if estimate.verdict in ("unchanged", "worse"):
        # An estimate that is closer to the threshold than to the floor is measured again.
        doubtful = abs(log(estimate.ratio)) >= log1p(halfway_threshold(rule))
        return StageResult(estimate, last or not doubtful)
    if _limited_by_meters(estimate, unchanged_rule.tolerance, better):
        return StageResult(estimate, done=True)
    if estimate.verdict in ("regressed", "improved"):
        pairs = stages.pairs_after(stage)
        reason = f"{estimate.verdict} after {pairs} pairs, not yet confirmed: {estimate.reason}"
        estimate = estimate.changed_to("inconclusive", reason)
    if by_change is not None:
        # The verdict ``unchanged`` of ``by_change`` does not count, since it used the alpha of changes.
        estimate = msgspec.structs.replace(estimate, detectable=by_change.detectable)
    return StageResult(estimate, last)


def _limited_by_meters(estimate: Estimate, tolerance: float, better: Direction) -> bool:
    """Whether only the meters prevent the verdict "unchanged", and more rounds would not help."""
    if estimate.low is None or estimate.high is None or estimate.meter_limit < tolerance:
        return False
    worst = estimate.high if better == "less" else 1 / estimate.low
    return worst < 1 + tolerance


@lru_cache(maxsize=256)
def rule_for_unchanged(stages: Stages, rule: Rule) -> Rule:
    """Return the rule by which any stage calls a test unchanged."""
    tolerance = min(rule.tolerance, rule.threshold) if stages.sharp else rule.tolerance
    return replace(rule, tolerance=tolerance, alpha=rule.alpha / len(stages.pairs))


@lru_cache(maxsize=256)
def rule_for_change(stage: int, stages: Stages, rule: Rule) -> Rule | None:
    """Return the rule by which a stage (from 1) calls a test changed; ``None`` at the first of several."""
    count = len(stages.pairs)
    if stage == 1 and count > 1:
        return None
    total = stages.pairs_after(count)
    alpha = _spent_alpha(stages.pairs_after(stage) / total, rule.alpha)
    if stage > 1 and count > 2:
        # With many stages, what the first one may not spend is not worth an early false alarm.
        alpha -= _spent_alpha(stages.pairs_after(stage - 1) / total, rule.alpha)
    return replace(
        rule,
        threshold=halfway_threshold(rule) if stages.sharp else rule.threshold,
        tolerance=rule_for_unchanged(stages, rule).tolerance,
        alpha=max(alpha, MIN_ALPHA),
    )


def halfway_threshold(rule: Rule) -> float:
    """Return the relative change midway between floor and threshold, but close to the threshold.

    A change of the threshold itself is as often estimated below as above it, so that it is found only if
    estimates somewhat below count too.
    """
    return rule.threshold - min(max((rule.threshold - rule.floor) / 2, 0.0), BELOW_THRESHOLD)


def _spent_alpha(share: float, alpha: float) -> float:
    """Return how much of ``alpha`` is spent after ``share`` of all pairs (Hwang, Shih and De Cani 1990)."""
    return alpha * expm1(-SPENDING * share) / expm1(-SPENDING)


def parse_pairs(text: str) -> Stages:
    """Parse the pairs of each stage, such as ``"6+6"``, ``"12"`` or ``"6+6+18"``."""
    if not re.fullmatch(r"\s*\d{1,4}(\s*\+\s*\d{1,4})*\s*", text):
        raise PlanError(f"invalid pairs {text!r}; expected the pairs of each stage, such as '6+6' or '12'")
    pairs = tuple(int(number) for number in text.split("+"))
    if pairs[0] < MIN_ROUNDS or 0 in pairs:
        raise PlanError(
            f"invalid pairs {text!r}; the first stage needs at least {MIN_ROUNDS} pairs and no stage may be 0"
        )
    return Stages(pairs)
