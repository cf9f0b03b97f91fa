# SPDX-License-Identifier: Apache-2.0
"""One metric of one test: what is compared by which rule, and the ``Comparison`` of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from pytest_llenergy.compare.metrics import direction_of, unit_of
from pytest_llenergy.compare.rule import DEFAULT_RULE, Rule
from pytest_llenergy.record.comparison import AppliedRule, Comparison, Verdict
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_energy_unit


@dataclass(frozen=True)
class Criterion:
    """A metric to compare and the rule for its verdict.

    A test must have a metric that its mark requests. One requested for all tests is compared only in tests
    that have it.
    """

    metric: str | None = None  # None is the default metric of each test
    rule: Rule = DEFAULT_RULE
    gated: bool = False  # whether the run can fail by the verdict
    from_mark: bool = False


class Case(NamedTuple):
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
        for side, each in (("base", self.base), ("head", self.head)):
            if each is not None:
                fields[side] = each.value_of(self.metric)
                fields[f"{side}_tokens_per_s"] = each.value_of("output_tokens_per_s")
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None
        unit = unit_of(self.metric, self.head, self.base)
        return Comparison(
            id=record.id,
            metric=self.metric,
            unit=unit,
            verdict=verdict,
            reason=reason,
            differences=list(differences),
            better=direction_of(self.metric, self.head, self.base),
            # Times and counts are measured even if the energy is estimated.
            kind=record.kind if is_energy_unit(unit) else None,
            rule=_applied_rule(self.criterion.rule),
            gated=gated and self.criterion.gated,
            from_mark=self.criterion.from_mark,
            **fields,
        )


@lru_cache(maxsize=64)
def _applied_rule(rule: Rule) -> AppliedRule:
    return msgspec.convert(rule, AppliedRule, from_attributes=True)
