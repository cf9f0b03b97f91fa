# SPDX-License-Identifier: Apache-2.0
"""What comparisons read: the same verdicts from half of it, and no broken report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.report import Report, decode_lean_report, decode_report, encode_report

from ..compare.runs import record_of, report_of, scaled
from .reports import REPORT

BASE, HEAD = (encode_report(report_of(record_of(joules=scaled(factor)))) for factor in (1.0, 1.1))


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(encode_report(REPORT))
    change(data)
    with pytest.raises(ReportError) as caught:
        decode_lean_report(json.dumps(data).encode(), "base.json")
    return str(caught.value)


def test_comparisons_of_every_metric_are_the_same() -> None:
    def compared(read: Callable[[bytes, str], Report]) -> object:
        asked = [Criterion(name, gated=True) for name in ROUND_METRICS]
        return compare_reports(read(BASE, "base"), read(HEAD, "head"), ("base", "head"), asked)

    assert compared(decode_lean_report) == compared(decode_report)


def test_every_part_of_a_report_is_read() -> None:
    report = decode_lean_report(encode_report(REPORT), "base.json")
    assert [record.id for record in report.records] == [record.id for record in REPORT.records]
    assert report.records[0].rounds[0].energy_j == 12.5


def test_a_broken_report_is_refused() -> None:
    assert "schema version 99 is newer than 1" in broken(lambda data: data.update(schema_version=99))
    assert "unknown field `joules`" in broken(lambda data: data["records"][0]["rounds"][0].update(joules=1))
    missing = broken(lambda data: data["records"][0]["rounds"][0].pop("energy_j"))
    assert "missing required field `energy_j`" in missing
