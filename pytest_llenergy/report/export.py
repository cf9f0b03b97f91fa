# SPDX-License-Identifier: Apache-2.0
"""Export reports to the formats of other tools."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Literal, get_args

import pytest_llenergy
from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.metrics import round_values
from pytest_llenergy.record.quantity import shown_unit
from pytest_llenergy.record.record import Metric, Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import escape_invisible
from pytest_llenergy.report.openmetrics import Family, Sample, render_openmetrics_text

#: Formats, each named after the tool that reads it.
Target = Literal[
    "pytest-benchmark",
    "github-action-benchmark",
    "github-action-benchmark-bigger",
    "bencher",
    "openmetrics",
    "csv",
]

TARGETS: tuple[Target, ...] = get_args(Target)

#: Formats that can hold both sides of a paired file.
WITH_SIDES: frozenset[Target] = frozenset({"openmetrics", "csv"})

#: Suffix of a metric, its replacement in the name of the gauge, and the unit in OpenMetrics.
_UNITS = (
    ("_tokens_per_s", "_rate", "tokens_per_second"),
    ("requests_per_s", "request_rate", "requests_per_second"),
    ("slo_attainment", "slo_attainment", "ratio"),
    ("flops", "work", "flops"),
    ("_acceptance_rate", "_acceptance", "ratio"),
    ("_bytes", "", "bytes"),
    ("_j", "", "joules"),
    ("_w", "", "watts"),
    ("_s", "", "seconds"),
)

#: Gauge of custom metrics. Name and unit are labels, since custom names may end like other gauges.
CUSTOM_GAUGE = ("llenergy_custom_metric", "", "Custom metric")

#: Longest name of a measure at Bencher (characters).
MAX_MEASURE = 64

#: Words for percentiles, since Bencher allows no digits in the name of a measure.
_PERCENTILES = {"p50": "fiftieth-percentile", "p90": "ninetieth-percentile", "p99": "ninety-ninth-percentile"}

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
    if target == "pytest-benchmark":
        return _render_pytest_benchmark(side)
    if target == "bencher":
        return _render_bencher(side)
    return _render_github_action_benchmark(side, "less" if target == "github-action-benchmark" else "more")


def _better(record: Record, name: str) -> Direction | None:
    """Return the direction of a metric that is better; None if a hook added the metric without one."""
    if name in METRICS:
        return METRICS[name].better
    return record.custom[name].better if name in record.custom else None


def _render_github_action_benchmark(side: ExportSide, better: Direction) -> str:
    """Render the metrics of one direction for github-action-benchmark.

    Its tools are ``customSmallerIsBetter`` and ``customBiggerIsBetter``. Values keep the units of the record,
    since the action plots one unit per series.
    """
    commit = side.report.source.commit
    entries = []
    for record, name, metric, value in side.values():
        if _better(record, name) == better:
            count = metric.n if metric.rounds is None else metric.rounds
            what = f"{'round' if name in METRICS else 'value'}{'' if count == 1 else 's'}"
            extra = [f"{count} {what}", record.kind, f"commit {commit}" if commit else None]
            entry = {"name": f"{record.id} {name}", "unit": metric.unit, "value": value}
            if metric.uncertainty is not None:
                entry["range"] = f"± {metric.uncertainty:.3g}"
            entries.append({**entry, "extra": "\n".join(filter(None, extra))})
    return json.dumps(entries, indent=2) + "\n"


def _render_bencher(side: ExportSide) -> str:
    """Render Bencher Metric Format: every metric, with limits one standard uncertainty away.

    See https://bencher.dev/docs/reference/bencher-metric-format/.
    """
    tests: dict[str, dict[str, dict[str, float]]] = {}
    for record, name, metric, value in side.values():
        measure, factor = bencher_measure(record, name, metric)
        entry = {"value": value * factor}
        if metric.uncertainty is not None:
            entry["lower_value"] = (value - metric.uncertainty) * factor
            entry["upper_value"] = (value + metric.uncertainty) * factor
        tests.setdefault(record.id, {})[measure] = entry
    return json.dumps(tests, indent=2) + "\n"


def bencher_measure(record: Record, name: str, metric: Metric) -> tuple[str, float]:
    """Return Bencher's measure of a metric, and the factor from the metric's unit to the measure's.

    The measure of a custom metric is named after it, with unit and direction, which the format cannot hold
    elsewhere.
    """
    if name == "duration_s":
        # The only measure that Bencher defines itself, in nanoseconds.
        return "latency", 1e9
    if name in METRICS:
        words = f"{name}econd" if name.endswith("_per_s") else re.sub("_(js|j|w|s|bytes)$", "", name)
        return "-".join(_PERCENTILES.get(word, word) for word in words.split("_")), 1.0
    better = _better(record, name)
    about = [shown_unit(metric.unit), f"{better} is better" if better is not None else ""]
    return f"{name} ({', '.join(filter(None, about))})"[:MAX_MEASURE], 1.0


def openmetrics_gauge(metric: str) -> tuple[str, str]:
    """Return the gauge of a built-in metric without its unit, and the unit."""
    suffix, replacement, unit = next(each for each in _UNITS if metric.endswith(each[0]))
    return f"llenergy_{metric.removesuffix(suffix)}{replacement}", unit


def _render_openmetrics(sides: Sequence[ExportSide]) -> str:
    """Render a gauge for each metric and one for its uncertainty, labelled by test, side and device."""
    gauges: dict[tuple[str, str, str], tuple[list[Sample], list[Sample]]] = {}
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
            values.append(Sample(labels, repr(float(value))))
            if metric.uncertainty is not None:
                uncertainties.append(Sample(labels, repr(float(metric.uncertainty))))
    families = []
    for (name, unit, what), (values, uncertainties) in gauges.items():
        end = f"_{unit}" if unit else ""
        families.append(Family(f"{name}{end}", f"{what} of a test, median over valid rounds.", values, unit))
        text = f"Standard uncertainty (k=1) of {what}."
        families.append(Family(f"{name}_uncertainty{end}", text, uncertainties, unit))
    return render_openmetrics_text(families)


def _render_pytest_benchmark(side: ExportSide) -> str:
    """Render the JSON of pytest-benchmark: seconds in ``stats``, all other metrics in ``extra_info``.

    The test's own ``extra_info`` is there too; a metric of the same name replaces a value.
    Energy never goes into ``stats``: readers of the format take ``stats`` for seconds, and ``ops`` for
    iterations per second of which more is better.
    """
    report = side.report
    machine: dict[str, Any] = {}
    if report.environment is not None:
        machine = _describe_machine(report.environment)
    source = report.source
    benchmarks = [_benchmark(record) for record in side.records() if record.counts]
    content = {
        "machine_info": machine,
        "commit_info": {"id": source.commit, "branch": source.branch, "dirty": source.dirty, "time": None},
        "benchmarks": [each for each in benchmarks if each is not None],
        "datetime": report.run.finished_at or report.run.started_at,
        "version": f"pytest-llenergy {pytest_llenergy.__version__}",
    }
    return json.dumps(content, indent=4) + "\n"


def _describe_machine(environment: Environment) -> dict[str, Any]:
    host = environment.host
    return {
        "node": host.name,
        "machine": host.machine,
        "processor": host.cpu_model,
        "system": host.system,
        "python_version": environment.python,
        "cpu": {"brand_raw": host.cpu_model, "count": host.logical_cpus},
    }


def _benchmark(record: Record) -> dict[str, Any] | None:
    seconds = [each.value for each in round_values("duration_s", record.rounds)[0]]
    if not seconds:
        return None
    path, bracket, params = record.id.partition("[")
    energy: dict[str, Any] = {
        name: metric.value
        for name, metric in record.metrics.items()
        if metric.value is not None and name != "duration_s"
    }
    energy |= {"energy_kind": record.kind} if record.kind is not None else {}
    if record.custom:
        energy["custom_metrics"] = {
            name: {"unit": record.metrics[name].unit, "better": each.better}
            for name, each in record.custom.items()
            if name in record.metrics
        }
    return {
        "group": None,
        "name": f"{path.rpartition('::')[2]}{bracket}{params}",
        "fullname": record.id,
        "params": record.params or None,
        "param": params.removesuffix("]") or None,
        "extra_info": record.extra_info | energy,
        "options": {"disable_gc": False, "timer": "monotonic", "warmup": record.procedure is not None},
        "stats": _stats(seconds, record.procedure.iterations if record.procedure is not None else 1),
    }


def _stats(seconds: Sequence[float], iterations: int) -> dict[str, Any]:
    """Return the fields of pytest-benchmark's ``stats.py``.

    Quartiles are Tukey's hinges, the medians of the halves.
    """
    ordered = sorted(seconds)
    n, mean = len(ordered), fmean(ordered)
    deviation = stdev(ordered) if n > 1 else 0.0
    half = (n + 1) // 2
    q1, q3 = median(ordered[:half]), median(ordered[n - half :])
    reach = 1.5 * (q3 - q1)
    inside = [each for each in ordered if q1 - reach <= each <= q3 + reach]
    beyond = sum(abs(each - mean) > deviation for each in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": n,
        "median": median(ordered),
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": n - len(inside),
        "stddev_outliers": beyond,
        "outliers": f"{beyond};{n - len(inside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean if mean else 0.0,
        "total": sum(ordered),
        "data": list(seconds),
        "iterations": iterations,
    }


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
