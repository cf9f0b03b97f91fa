# SPDX-License-Identifier: Apache-2.0
"""One metric of one test: what is compared by which rule, and the ``Comparison`` of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from pytest_llenergy.compare.metrics import direction_of, unit_of
from pytest_llenergy.compare.rule import DEFAULT_RULE, Rule
from pytest_llenergy.record.comparison import AppliedRule, Comparison, Verdict
from pytest_llenergy.record.metrics import ROUND_METRICS, applies_to_rounds
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_energy_unit

#: The maximum load of a server: each session has one value, which its rounds repeat.
MAX_LOAD = "max_load_requests_per_s"


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

    def decide(
        self,
        verdict: Verdict,
        reason: str,
        differences: Sequence[str] = (),
        *,
        gated: bool = True,
        **fields: Any,
    ) -> Comparison:
        """Return the comparison with a verdict; ``fields`` are what is known of the estimate.

        Infinite numbers and NaN, which JSON lacks, become None. Without ``gated`` no gate counts it.
        """
        record = self.head or self.base
        assert record is not None
        sides = ("base", self.base), ("head", self.head)
        recorded = {side: each.value_of(self.metric) for side, each in sides if each is not None}
        speeds = {
            f"{side}_tokens_per_s": each.value_of("output_tokens_per_s")
            for side, each in sides
            if each is not None
        }
        known = {name: value for name, value in (recorded | speeds).items() if value is not None}
        values = {name: _finite_or_none(value) for name, value in (fields | known).items()}
        return Comparison(
            id=record.id,
            metric=self.metric,
            unit=unit_of(self.metric, self.head, self.base),
            verdict=verdict,
            reason=reason,
            differences=list(differences),
            better=direction_of(self.metric, self.head, self.base),
            # Times and counts are measured even if the energy is estimated.
            kind=record.kind if is_energy_unit(unit_of(self.metric, self.head, self.base)) else None,
            rule=_applied_rule(self.criterion.rule),
            gated=gated and self.criterion.gated,
            from_mark=self.criterion.from_mark,
            **values,
        )


def has_metric(metric: str, record: Record) -> bool:
    """Return whether a record has a metric, built in or custom, even if some sessions lack its value."""
    if metric not in ROUND_METRICS:
        return record.value_of(metric) is not None or metric in record.custom
    return applies_to_rounds(metric, record.rounds)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@lru_cache(maxsize=64)
def _applied_rule(rule: Rule) -> AppliedRule:
    return AppliedRule(**asdict(rule))
