# SPDX-License-Identifier: Apache-2.0
"""Export reports to the formats of other tools."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import escape_invisible

#: Formats, each named after the tool that reads it.
Target = Literal["github-action-benchmark", "csv"]

TARGETS: tuple[Target, ...] = get_args(Target)

#: Columns of the CSV, which has a line for each metric of each test.
CSV_COLUMNS = (
    *("id", "side", "run_id", "started_at", "commit", "device_key", "kind", "status"),
    *("metric", "value", "unit", "uncertainty", "n", "reason", "better"),
)


def export_report(sides: Mapping[str, Report], target: Target) -> str:
    """Render a report, or both sides of one by name; only CSV has more than the last side.

    Raises:
        ReportError: An attempt at a test is there twice.
    """
    if target == "csv":
        return _render_csv(sides)
    name, report = list(sides.items())[-1]
    return _render_github_action_benchmark(report, name)


def _last_attempts(report: Report, side: str) -> list[Record]:
    return list(select_last_attempts(report.records, side or "the report").values())


def _better(record: Record, name: str) -> Direction | None:
    """Return the direction of a metric that is better; None if a hook added the metric without one."""
    if name in METRICS:
        return METRICS[name].better
    return record.custom[name].better if name in record.custom else None


def _render_github_action_benchmark(report: Report, side: str) -> str:
    """Render the metrics of which less is better for the tool ``customSmallerIsBetter``.

    Values keep the units of the record, since the action plots one unit per series.
    """
    commit = report.source.commit
    entries = []
    for record in _last_attempts(report, side):
        for name, metric in record.metrics.items() if record.counts else ():
            if metric.value is None or _better(record, name) != "less":
                continue
            count = metric.n if metric.rounds is None else metric.rounds
            what = f"{'round' if name in METRICS else 'value'}{'' if count == 1 else 's'}"
            extra = [f"{count} {what}", record.kind, f"commit {commit}" if commit else None]
            entry = {"name": f"{record.id} {name}", "unit": metric.unit, "value": metric.value}
            if metric.uncertainty is not None:
                entry["range"] = f"± {metric.uncertainty:.3g}"
            entries.append({**entry, "extra": "\n".join(filter(None, extra))})
    return json.dumps(entries, indent=2) + "\n"


def _render_csv(sides: Mapping[str, Report]) -> str:
    """Render all tests; those without values have one line with an empty value and the reason."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(CSV_COLUMNS)
    for side, report in sides.items():
        for record in _last_attempts(report, side):
            for line in _csv_lines(side, report, record):
                writer.writerow([escape_invisible(cell) if isinstance(cell, str) else cell for cell in line])
    return text.getvalue()


def _csv_lines(side: str, report: Report, record: Record) -> Iterator[list[object]]:
    run, commit = report.run, report.source.commit
    # Equal for tests on the same kind of devices, measured with the same meters.
    key = fingerprint(device_facts(record, report.environment)) if record.meters else None
    about = [record.id, side, run.id, run.started_at, commit, key, record.kind, record.status]
    if not record.metrics:
        yield [*about, None, None, None, None, None, record.reason, None]
    for name, metric in record.metrics.items():
        values = metric.value, metric.unit, metric.uncertainty, metric.n
        yield [*about, name, *values, metric.reason or record.reason, _better(record, name)]
