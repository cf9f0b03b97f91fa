# SPDX-License-Identifier: Apache-2.0
"""One look at all rounds so far: the verdict of each test's stage, and which tests take more pairs."""

from __future__ import annotations

from collections.abc import Callable

from pytest_llenergy.compare.metrics import Direction
from pytest_llenergy.compare.stages import Policy, judge
from pytest_llenergy.compare.statistics import Estimate, Rule, Sample
from pytest_llenergy.model.record import Record


class Look:
    """Finds estimates for ``compare_reports``. ``open`` are the tests of which a metric is not clear yet."""

    def __init__(self, policy: Policy, stage_of: Callable[[str], int]) -> None:
        self._policy = policy
        self._stage_of = stage_of
        self.open: set[str] = set()

    def __call__(self, record: Record, base: Sample, head: Sample, rule: Rule, better: Direction) -> Estimate:
        """The estimate of a metric, at the stage at which its test is."""
        step = judge(base, head, self._stage_of(record.id), self._policy, rule, better)
        if not step.done:
            self.open.add(record.id)
        return step.estimate
