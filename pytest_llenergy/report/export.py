# SPDX-License-Identifier: Apache-2.0
"""Export reports as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import escape_invisible

#: There is a line for each metric of each test.
COLUMNS = (
    *("id", "side", "run_id", "started_at", "commit", "device_key", "kind", "status"),
    *("metric", "value", "unit", "uncertainty", "n", "reason", "better"),
)


def render_csv(sides: Mapping[str, Report]) -> str:
    """Render the last attempt of each test of one report, or of both sides by name.

    Tests without values have one line with an empty value and the reason.

    Raises:
        ReportError: An attempt is there twice.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for side, report in sides.items():
        for record in select_last_attempts(report.records, side or "the report").values():
            for line in _list_lines(side, report, record):
                writer.writerow([escape_invisible(cell) if isinstance(cell, str) else cell for cell in line])
    return text.getvalue()


def _list_lines(side: str, report: Report, record: Record) -> Iterator[list[object]]:
    run, commit = report.run, report.source.commit
    # Equal for tests on the same kind of devices, measured with the same meters.
    key = fingerprint(device_facts(record, report.environment)) if record.meters else None
    about = [record.id, side, run.id, run.started_at, commit, key, record.kind, record.status]
    if not record.metrics:
        yield [*about, None, None, None, None, None, record.reason, None]
    for name, metric in record.metrics.items():
        # A hook may have added a metric without a direction.
        described = METRICS.get(name) or record.custom.get(name)
        better = described.better if described is not None else None
        values = metric.value, metric.unit, metric.uncertainty, metric.n
        yield [*about, name, *values, metric.reason or record.reason, better]
