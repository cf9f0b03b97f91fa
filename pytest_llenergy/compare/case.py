# SPDX-License-Identifier: Apache-2.0
"""One metric of one test: what is compared by which rule, and the ``Comparison`` of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

from pytest_llenergy.compare.metrics import direction_of, unit_of
from pytest_llenergy.compare.rule import DEFAULT_RULE, Rule
from pytest_llenergy.compare.statistics import Estimate, Sample
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import AppliedRule, Comparison, Verdict
from pytest_llenergy.record.metrics import BUILT_IN, ROUND_METRICS, applies_to_rounds
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_energy_unit

#: A head that is better by a larger factor is no improvement but another unit, or other work.
MAX_TIMES_BETTER = 100.0


@dataclass(frozen=True)
class Criterion:
    """A metric to compare and the rule for its verdict.

    Attributes:
        metric: The metric, or ``None`` for the default metric of each test.
        rule: The statistical rule.
        gated: Whether the run can fail by the verdict.
        from_mark: Whether a mark of the test requests the metric, which the test must then have. A metric
            requested for all tests is compared only in tests that have it.
    """

    metric: str | None = None
    rule: Rule = DEFAULT_RULE
    gated: bool = False
    from_mark: bool = False


@dataclass(frozen=True)
class Case:
    """One metric of one test, with the records of the sides that have the test."""

    metric: str
    criterion: Criterion
    base: Record | None
    head: Record | None
    gated: bool

    def without_estimate(self, verdict: Verdict, reason: str, differences: Sequence[str] = ()) -> Comparison:
        return self._comparison(verdict=verdict, reason=reason, differences=list(differences))

    def with_estimate(
        self, base: Sample, head: Sample, estimate: Estimate, notes: Sequence[str]
    ) -> Comparison:
        verdict: Verdict = estimate.verdict
        reason = estimate.reason
        better = direction_of(self.metric, self.head, self.base)
        times = _times_better(estimate.ratio, better)
        if verdict == "improved" and times > MAX_TIMES_BETTER:
            verdict, reason = (
                "invalid",
                f"head is {times:.0f} times better: another unit, or not the same work",
            )
        return self._comparison(
            verdict=verdict,
            reason=reason,
            ratio=finite_or_none(estimate.ratio),
            low=finite_or_none(estimate.low),
            high=finite_or_none(estimate.high),
            # The values of the tables; a report without metrics has those of its rounds.
            base=_first_known(_recorded_value(self.base, self.metric), median(base.values)),
            head=_first_known(_recorded_value(self.head, self.metric), median(head.values)),
            n_base=len(base.values),
            n_head=len(head.values),
            noise=finite_or_none(estimate.noise),
            detectable=finite_or_none(estimate.detectable),
            p=finite_or_none(estimate.p),
            session_spread=estimate.session_spread or None,
            notes=list(notes),
        )

    def with_values(
        self,
        verdict: Verdict,
        reason: str,
        counts: Sequence[int],
        notes: Sequence[str],
        limits: Mapping[str, float | None],
    ) -> Comparison:
        n_base, n_head = counts
        return self._comparison(
            verdict=verdict, reason=reason, n_base=n_base, n_head=n_head, notes=list(notes), **limits
        )

    def _comparison(self, verdict: Verdict, reason: str, **fields: Any) -> Comparison:
        record = self.head or self.base
        assert record is not None
        values = {
            "base": _recorded_value(self.base, self.metric),
            "head": _recorded_value(self.head, self.metric),
        }
        return Comparison(
            id=record.id,
            metric=self.metric,
            unit=unit_of(self.metric, self.head, self.base),
            verdict=verdict,
            reason=reason,
            better=direction_of(self.metric, self.head, self.base),
            # Times and counts are measured even if the joules are estimated.
            kind=record.kind if is_energy_metric(self.metric) else None,
            rule=_applied_rule(self.criterion.rule),
            gated=self.gated,
            from_mark=self.criterion.from_mark,
            base_tokens_per_s=_recorded_value(self.base, "output_tokens_per_s"),
            head_tokens_per_s=_recorded_value(self.head, "output_tokens_per_s"),
            **{**values, **fields},
        )


def is_energy_metric(metric: str) -> bool:
    """Return whether a metric is built in and depends on joules."""
    return metric in BUILT_IN and is_energy_unit(BUILT_IN[metric].unit)


def has_metric(metric: str, record: Record) -> bool:
    """Return whether a record has a metric, built in or custom, even if some sessions lack its value."""
    if metric not in ROUND_METRICS:
        return record.value_of(metric) is not None or metric in record.custom
    return applies_to_rounds(metric, record.rounds)


def _recorded_value(record: Record | None, metric: str) -> float | None:
    return finite_or_none(record.value_of(metric)) if record is not None else None


def _first_known(recorded: float | None, computed: float) -> float | None:
    return recorded if recorded is not None else finite_or_none(computed)


def _times_better(ratio: float | None, better: Direction) -> float:
    """How many times better the head is; 1 if unknown."""
    return 1.0 if not ratio else ratio if better == "more" else 1 / ratio


def finite_or_none(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None


@lru_cache(maxsize=64)
def _applied_rule(rule: Rule) -> AppliedRule:
    return AppliedRule(
        threshold=rule.threshold,
        threshold_absolute=rule.threshold_absolute,
        floor=rule.floor,
        tolerance=rule.tolerance,
        alpha=rule.alpha,
    )
