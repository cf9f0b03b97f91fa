# SPDX-License-Identifier: Apache-2.0
"""Base, head and change that stand next to each other agree, in every output."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.gate import explain_failure
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.report.verdicts import format_change, format_sides

from ..compare.runs import record_of, report_of

#: Two modes a side: the head is mostly lower, and yet its median is higher.
BASE = (4.30, 5.60, 4.31, 5.61, 4.36, 4.32, 5.62, 4.33, 5.63, 5.64, 4.34)
HEAD = (3.60, 4.54, 3.61, 4.55, 4.58, 3.62, 4.56, 3.63, 4.59, 4.57, 3.64)


def contradicting() -> ComparedReports:
    reports = report_of(record_of(joules=BASE)), report_of(record_of(joules=HEAD))
    return compare_reports(*reports, ("base.json", "head.json"), [Criterion(gated=True)])


def check(base: str, head: str, change: str) -> None:
    """The change of the figures shown is the change shown, but for their rounding."""
    of_figures = float(head) / float(base) - 1
    assert of_figures == pytest.approx(float(change) / 100, abs=0.0006 + 0.001 * (1 + of_figures))
    assert of_figures * float(change) >= -1e-12


def test_the_medians_contradict_the_estimate() -> None:
    (found,) = contradicting().comparisons
    assert (found.head or 0) > (found.base or 0) > 0
    assert (found.ratio or 1) < 0.95


def test_the_message_of_a_failed_gate_agrees_with_its_change() -> None:
    (found,) = contradicting().comparisons
    message = explain_failure(msgspec.structs.replace(found, verdict="regressed", gated=True), "warn")
    assert message is not None
    pair = re.search(r"([\d.]+) -> ([\d.]+) m?J/token", message)
    assert pair
    check(pair[1], pair[2], format_change(found.ratio).rstrip("%"))


def test_base_head_and_change_agree() -> None:
    draw = random.Random(1)
    for _ in range(20_000):
        base, ratio = 10 ** draw.uniform(-9, 9), 10 ** draw.uniform(-1, 1) ** 3
        found = Comparison(
            id="t",
            metric="m",
            unit=draw.choice(["J", "s", "J/token"]),
            verdict="unchanged",
            reason="",
            base=base,
            head=10 ** draw.uniform(-9, 9),
            ratio=ratio,
        )
        left, right = format_sides(found)
        check(left, right.split()[0], format_change(found.ratio).rstrip("%"))
