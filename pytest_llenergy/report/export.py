# SPDX-License-Identifier: Apache-2.0
"""Export reports to the formats of other tools."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.record import Metric, Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import escape_invisible, escape_lines

#: Formats, each named after the tool that reads it.
Target = Literal["github-action-benchmark", "openmetrics", "csv"]

TARGETS: tuple[Target, ...] = get_args(Target)

#: Formats that can hold both sides of a paired file.
WITH_SIDES: frozenset[Target] = frozenset({"openmetrics", "csv"})

#: Suffix of a metric, its replacement in the name of the gauge, and the unit in OpenMetrics.
_UNITS = (
    ("_tokens_per_s", "_rate", "tokens_per_second"),
    ("requests_per_s", "request_rate", "requests_per_second"),
    ("slo_attainment", "slo_attainment", "ratio"),
    ("_acceptance_rate", "_acceptance", "ratio"),
    ("_bytes", "", "bytes"),
    ("_j", "", "joules"),
    ("_w", "", "watts"),
    ("_s", "", "seconds"),
)

#: Gauge of custom metrics. Name and unit are labels, since custom names may end like other gauges.
CUSTOM_GAUGE = ("llenergy_custom_metric", "", "Custom metric")

#: Columns of the CSV, which has a line for each metric of each test.
CSV_COLUMNS = (
    *("id", "side", "run_id", "started_at", "commit", "device_key", "kind", "status"),
    *("metric", "value", "unit", "uncertainty", "n", "reason", "better"),
)


@dataclass(frozen=True)
class ExportSide:
    """One report. ``name`` is ``base`` or ``head`` in a paired file, and empty elsewhere."""

    name: str
    report: Report

    def records(self) -> list[Record]:
        """Return the last attempt of each test, or raise ``ReportError`` if an attempt is there twice."""
        return list(select_last_attempts(self.report.records, self.name or "the report").values())

    def values(self) -> Iterator[tuple[Record, str, Metric, float]]:
        """Yield the metrics that have a value, of tests with valid measurements."""
        for record in self.records():
            for name, metric in record.metrics.items():
                if record.counts and metric.value is not None:
                    yield record, name, metric, metric.value

    def device_key(self, record: Record) -> str:
        """Return a key that is equal for tests on the same kind of devices, measured with the same meters."""
        return fingerprint(device_facts(record, self.report.environment))


def export_report(sides: Sequence[ExportSide], target: Target) -> str:
    """Render a report in a format: one side, or both if the format is in ``WITH_SIDES``."""
    if target == "openmetrics":
        return _render_openmetrics(sides)
    if target == "csv":
        return _render_csv(sides)
    (side,) = sides
    return _render_github_action_benchmark(side)


def _better(record: Record, name: str) -> Direction | None:
    """Return the direction of a metric that is better; None if a hook added the metric without one."""
    if name in METRICS:
        return METRICS[name].better
    return record.custom[name].better if name in record.custom else None


def _render_github_action_benchmark(side: ExportSide) -> str:
    """Render the metrics of which less is better for the tool ``customSmallerIsBetter``.

    Values keep the units of the record, since the action plots one unit per series.
    """
    commit = side.report.source.commit
    entries = []
    for record, name, metric, value in side.values():
        if _better(record, name) == "less":
            count = metric.n if metric.rounds is None else metric.rounds
            what = f"{'round' if name in METRICS else 'value'}{'' if count == 1 else 's'}"
            extra = [f"{count} {what}", record.kind, f"commit {commit}" if commit else None]
            entry = {"name": f"{record.id} {name}", "unit": metric.unit, "value": value}
            if metric.uncertainty is not None:
                entry["range"] = f"± {metric.uncertainty:.3g}"
            entries.append({**entry, "extra": "\n".join(filter(None, extra))})
    return json.dumps(entries, indent=2) + "\n"


def openmetrics_gauge(metric: str) -> tuple[str, str]:
    """Return the gauge of a built-in metric without its unit, and the unit."""
    suffix, replacement, unit = next(each for each in _UNITS if metric.endswith(each[0]))
    return f"llenergy_{metric.removesuffix(suffix)}{replacement}", unit


def _render_openmetrics(sides: Sequence[ExportSide]) -> str:
    """Render a gauge for each metric and one for its uncertainty, labelled by test, side and device.

    OpenMetrics 1.0, see https://prometheus.io/docs/specs/om/open_metrics_spec/.
    """
    gauges: dict[tuple[str, str, str], tuple[list[str], list[str]]] = {}
    for side in sides:
        keys = {record.id: side.device_key(record) for record in side.records()}
        for record, name, metric, value in side.values():
            labels = {
                "test": record.id,
                "side": side.name,
                "device": keys[record.id],
                "kind": record.kind or "",
                "commit": side.report.source.commit or "",
            }
            gauge = (*openmetrics_gauge(name), name) if name in METRICS else CUSTOM_GAUGE
            if name not in METRICS:
                labels |= {"metric": name, "unit": metric.unit, "better": _better(record, name) or ""}
            values, uncertainties = gauges.setdefault(gauge, ([], []))
            shown = _format_labels(labels)
            values.append(f"{shown} {float(value)!r}")
            if metric.uncertainty is not None:
                uncertainties.append(f"{shown} {float(metric.uncertainty)!r}")
    lines: list[str] = []
    for (name, unit, what), (values, uncertainties) in gauges.items():
        end = f"_{unit}" if unit else ""
        lines += _family(f"{name}{end}", unit, f"{what} of a test, median over valid rounds.", values)
        about = f"Standard uncertainty (k=1) of {what}."
        lines += _family(f"{name}_uncertainty{end}", unit, about, uncertainties)
    return "\n".join([*lines, "# EOF"]) + "\n"


def _family(name: str, unit: str, about: str, samples: Sequence[str]) -> list[str]:
    if not samples:
        return []
    units = [f"# UNIT {name} {unit}"] if unit else []
    return [f"# TYPE {name} gauge", *units, f"# HELP {name} {about}", *(f"{name}{each}" for each in samples)]


def _format_labels(labels: Mapping[str, str]) -> str:
    """Format labels; empty ones are left out."""
    escaped = {
        name: escape_lines(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        for name, value in labels.items()
    }
    text = ",".join(f'{name}="{value}"' for name, value in escaped.items() if value)
    return f"{{{text}}}" if text else ""


def _render_csv(sides: Sequence[ExportSide]) -> str:
    """Render all tests; those without values have one line with an empty value and the reason."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(CSV_COLUMNS)
    for side in sides:
        for record in side.records():
            for line in _csv_lines(side, record):
                writer.writerow([escape_invisible(cell) if isinstance(cell, str) else cell for cell in line])
    return text.getvalue()


def _csv_lines(side: ExportSide, record: Record) -> Iterator[list[object]]:
    run, commit = side.report.run, side.report.source.commit
    key = side.device_key(record) if record.meters else None
    about = [record.id, side.name, run.id, run.started_at, commit, key, record.kind, record.status]
    if not record.metrics:
        yield [*about, None, None, None, None, None, record.reason, None]
    for name, metric in record.metrics.items():
        values = metric.value, metric.unit, metric.uncertainty, metric.n
        yield [*about, name, *values, metric.reason or record.reason, _better(record, name)]
