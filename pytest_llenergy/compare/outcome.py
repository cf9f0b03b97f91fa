# SPDX-License-Identifier: Apache-2.0
"""What a comparison comes to for a program that asks: its exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_llenergy.compare.gate import Inconclusive
from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report

PASSED, REGRESSED, USAGE, NOT_COMPARABLE, INCONCLUSIVE, NOTHING_VALID = range(6)


def exit_code(comparisons: Iterable[Comparison], inconclusive: Inconclusive) -> int:
    """The code of the worst that was found.

    What could not be judged is no pass: 3 where a test is not comparable, 5 where one has no valid
    measurement, or where nothing was judged at all. New and removed tests are told and nothing else.
    """
    found = list(comparisons)
    verdicts = {each.verdict for each in found if each.gated}
    if "regressed" in verdicts:
        return REGRESSED
    if "not comparable" in verdicts:
        return NOT_COMPARABLE
    if "invalid" in verdicts or not any(each.judged for each in found):
        return NOTHING_VALID
    if "inconclusive" in verdicts and inconclusive == "fail":
        return INCONCLUSIVE
    return PASSED


def over_budget(base: Report, head: Report) -> list[Record]:
    """Tests of the head that are over their budget and on the base are not."""
    before: Mapping[str, Record] = {record.id: record for record in base.records}
    return [
        record
        for record in head.records
        if record.failed_gate and not (record.id in before and before[record.id].failed_gate)
    ]
