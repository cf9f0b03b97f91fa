# SPDX-License-Identifier: Apache-2.0
"""How many pairs of rounds: those of the next stage, or none, because the verdict is clear.

A pair is one round of the base and one of the head, measured next to each other and in turn (ABBA). After
each stage a benchmark is judged on all of its pairs: what is clear is done, the rest gets the pairs of the
next stage. Nothing is called a change after the first of several stages: an alarm is measured again before it
is one.

Who looks several times gives chance several tries, so ``alpha`` is shared out among the looks. What is spent
on calling something unchanged is the same at each. What is spent on changes grows with the pairs as proposed
by P. C. O'Brien and T. R. Fleming, "A multiple testing procedure for clinical trials", Biometrics 35 (1979),
in the form of K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika
70 (1983): little early, so that only what is obvious ends early, and nearly all at the last look. That looks
share their first pairs is not made use of (Bonferroni's bound).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import log, log1p, sqrt
from statistics import NormalDist

from pytest_llenergy.compare.metrics import Direction
from pytest_llenergy.compare.statistics import (
    DEFAULT_RULE,
    MIN_ROUNDS,
    Estimate,
    Rule,
    Sample,
    compare_samples,
)
from pytest_llenergy.errors import PlanError

#: What rounding leaves of a share that is too small: there is no limit that is so sure.
MIN_ALPHA = 1e-12

CHANGES = ("regressed", "improved")


@dataclass(frozen=True)
class Stages:
    """Pairs that each stage adds.

    One or two stages find what is clearly above the threshold: a change of exactly the threshold is found in
    half of all cases, since its estimate is as often below as above. Three or more are ``sharp``.
    """

    stages: tuple[int, ...] = (6, 6)

    @property
    def sharp(self) -> bool:
        """Whether a change of just the threshold is to be found, for which more pairs are needed."""
        return len(self.stages) > 2

    def pairs_after(self, stage: int) -> int:
        """Pairs in all after so many stages."""
        return list(accumulate(self.stages))[stage - 1]

    def __str__(self) -> str:
        return "+".join(map(str, self.stages))


#: Six pairs, and six more for what is not unchanged then.
DEFAULT_STAGES = Stages((6, 6))
#: For changes of the threshold itself.
SHARP_STAGES = Stages((6, 6, 12, 12))


@dataclass(frozen=True)
class StageResult:
    """What is known after a stage, and the ``more`` pairs that it takes; 0 where the verdict is final."""

    estimate: Estimate
    more: int

    @property
    def done(self) -> bool:
        return self.more == 0


def decide_stage(
    base: Sample,
    head: Sample,
    stage: int,
    policy: Stages = DEFAULT_STAGES,
    rule: Rule = DEFAULT_RULE,
    better: Direction = "less",
) -> StageResult:
    """Look at all rounds so far, after ``stage`` stages (from 1) of the policy.

    Raises ``ValueError`` for a stage that the policy does not have.
    """
    if not 1 <= stage <= len(policy.stages):
        raise ValueError(f"there is no stage {stage} of {policy}")
    more = 0 if stage == len(policy.stages) else policy.stages[stage]
    changes = rule_for_change(stage, policy, rule)
    found = compare_samples(base, head, changes, better) if changes is not None else None
    if found is not None and found.verdict in CHANGES:
        return StageResult(found, 0)
    calm = compare_samples(base, head, rule_for_unchanged(policy, rule), better)
    if calm.ratio is None:
        return StageResult(calm, 0)
    if calm.verdict == "unchanged":
        # An estimate that is nearer to the threshold than to the floor is looked at again.
        doubtful = abs(log(calm.ratio)) >= log1p(halfway(rule))
        return StageResult(calm, more if doubtful else 0)
    if _limited_by_meters(calm, rule_for_unchanged(policy, rule).tolerance, better):
        return StageResult(calm, 0)
    # What "found" calls unchanged was held to the alpha of changes: that counts for nothing.
    detectable = calm.detectable if found is None else found.detectable
    return StageResult(_withhold_change(replace(calm, detectable=detectable), stage, policy), more)


def _limited_by_meters(estimate: Estimate, tolerance: float, better: Direction) -> bool:
    """Whether only the meters keep it from being unchanged: more rounds do not make them better."""
    if estimate.low is None or estimate.high is None or estimate.meter < tolerance:
        return False
    worst = estimate.high if better == "less" else 1 / estimate.low
    return worst < 1 + tolerance


@lru_cache(maxsize=256)
def rule_for_unchanged(policy: Stages, rule: Rule) -> Rule:
    """By which a benchmark is called unchanged, at any look."""
    tolerance = min(rule.tolerance, rule.threshold) if policy.sharp else rule.tolerance
    return replace(rule, tolerance=tolerance, alpha=rule.alpha / len(policy.stages))


@lru_cache(maxsize=256)
def rule_for_change(stage: int, policy: Stages, rule: Rule) -> Rule | None:
    """By which it is called changed; ``None`` at the first of several looks."""
    stages = len(policy.stages)
    if stage == 1 and stages > 1:
        return None
    total = policy.pairs_after(stages)
    alpha = _spend_alpha(policy.pairs_after(stage) / total, rule.alpha)
    if stage > 2:
        alpha -= _spend_alpha(policy.pairs_after(stage - 1) / total, rule.alpha)
    return replace(
        rule,
        threshold=halfway(rule) if policy.sharp else rule.threshold,
        tolerance=rule_for_unchanged(policy, rule).tolerance,
        alpha=max(alpha, MIN_ALPHA),
    )


def halfway(rule: Rule) -> float:
    """Relative change in the middle of floor and threshold; the threshold where the floor is above it."""
    return min(rule.threshold, (rule.threshold + rule.floor) / 2)


def _spend_alpha(share: float, alpha: float) -> float:
    """Of ``alpha``, after this share of all pairs."""
    law = NormalDist()
    return 2 - 2 * law.cdf(law.inv_cdf(1 - alpha / 2) / sqrt(share))


def _withhold_change(estimate: Estimate, stage: int, policy: Stages) -> Estimate:
    if estimate.verdict not in CHANGES:
        return estimate
    pairs = policy.pairs_after(stage)
    reason = f"{estimate.verdict} after {pairs} pairs, not confirmed yet: {estimate.reason}"
    return replace(estimate, verdict="inconclusive", reason=reason)


def parse_pairs(text: str) -> Stages:
    """Read ``"6+6"``, ``"12"``, ``"6+6+18"``. Raises ``PlanError`` for what is no such sum."""
    if not re.fullmatch(r"\s*\d{1,4}(\s*\+\s*\d{1,4})*\s*", text):
        raise PlanError(f"pairs {text!r} are no numbers of pairs, such as '6+6' or '12'")
    stages = tuple(int(one) for one in text.split("+"))
    if stages[0] < MIN_ROUNDS or 0 in stages:
        raise PlanError(
            f"pairs {text!r} begin with fewer than {MIN_ROUNDS} or add none: write such as '6+6' or '12'"
        )
    return Stages(stages)
