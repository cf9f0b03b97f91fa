# SPDX-License-Identifier: Apache-2.0
"""Export reports to the formats of other tools."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Literal

import pytest_llenergy
from pytest_llenergy.compare.comparability import device_facts, fingerprint
from pytest_llenergy.compare.comparison import select_last_attempts
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.measure.metrics import values_of
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.record import MeterInfo, Metric, Record
from pytest_llenergy.model.report import Report
from pytest_llenergy.report.ci import Family, Sample, render_openmetrics_text

# Reports in the formats of other tools.


# What is exported: the tests of a report or, of a paired file, those of both sides.


@dataclass(frozen=True)
class ExportSide:
    """One report. ``name`` is ``base`` or ``head`` in a paired file, and empty elsewhere."""

    name: str
    report: Report

    def records(self) -> list[Record]:
        """The last attempt of each test. Raises ``ReportError`` for one that is there twice."""
        return list(select_last_attempts(self.report.records, self.name or "the report").values())

    def measured(self) -> list[Record]:
        """Those whose figures count."""
        return [record for record in self.records() if record.counts]

    def device_key(self, record: Record) -> str:
        """Equal for tests that ran on the same kind of devices and were measured in the same way."""
        return fingerprint(device_facts(record, self.report.environment))


def benchmark_extra_info(metrics: Mapping[str, Metric], meters: Sequence[MeterInfo]) -> dict[str, Primitive]:
    """The figures of one test for ``extra_info`` of pytest-benchmark, whose own fields are for seconds.

    Those of an iteration of the work, with the standard uncertainties of ``energy_j`` for comparing runs and,
    accuracy of the source included, in itself; or the reason why there is none.
    """
    told: dict[str, Primitive] = {
        name: metric.value
        for name, metric in metrics.items()
        if metric.value is not None and ("J" in metric.unit or metric.unit == "W")
    }
    energy = metrics["energy_j"]
    if energy.value is not None:
        told |= {"energy_u_j": energy.uncertainty, "energy_u_absolute_j": energy.uncertainty_absolute}
        told["energy_windows"] = energy.n
    if energy.reason is not None:
        told["energy_reason"] = energy.reason
    if meters:
        estimated = any(meter.kind == "estimated" for meter in meters)
        told["energy_kind"] = "estimated" if estimated else "measured"
        told["energy_meters"] = ", ".join(dict.fromkeys(meter.name for meter in meters))
    return told


def iter_values(record: Record) -> Iterator[tuple[str, Metric, float]]:
    """The metrics that have a value."""
    for name, metric in record.metrics.items():
        if metric.value is not None:
            yield name, metric, metric.value


# ``customSmallerIsBetter`` of github-action-benchmark.


def render_github_action_benchmark(side: ExportSide) -> str:
    """Every metric of which less is better. Units are those of the record, so that no value is scaled."""
    commit = side.report.source.commit
    written = []
    for record in side.measured():
        for name, metric, value in iter_values(record):
            if METRICS[name].better != "less":
                continue
            u = metric.uncertainty
            about = [f"{metric.n} rounds", record.kind, f"commit {commit}" if commit else None]
            entry = {"name": f"{record.id} {name}", "unit": metric.unit, "value": value}
            if u is not None:
                entry["range"] = f"± {u:.3g}"
            entry["extra"] = "\n".join(filter(None, about))
            written.append(entry)
    return json.dumps(written, indent=2) + "\n"


# Bencher Metric Format, https://bencher.dev/docs/reference/bencher-metric-format/.

#: What Bencher calls a metric, and what turns it into its unit. Its own ``latency`` is nanoseconds; the
#: others are made with the units of the record.
BENCHER_MEASURES = {
    "energy_j": ("energy", 1.0),
    "energy_per_output_token_j": ("energy-per-output-token", 1.0),
    "energy_per_request_j": ("energy-per-request", 1.0),
    "net_energy_j": ("net-energy", 1.0),
    "prefill_energy_j": ("prefill-energy", 1.0),
    "decode_energy_j": ("decode-energy", 1.0),
    "mean_power_w": ("mean-power", 1.0),
    "duration_s": ("latency", 1e9),
    "output_tokens_per_s": ("output-tokens-per-second", 1.0),
    "time_to_first_token_s": ("time-to-first-token", 1.0),
    "inter_token_latency_s": ("inter-token-latency", 1.0),
    "peak_memory_bytes": ("peak-memory", 1.0),
    "flops": ("flops", 1.0),
    "energy_per_flop_j": ("energy-per-flop", 1.0),
    "steady_energy_per_output_token_j": ("steady-energy-per-output-token", 1.0),
    "steady_output_tokens_per_s": ("steady-output-tokens-per-second", 1.0),
    "requests_per_s": ("requests-per-second", 1.0),
    "end_to_end_latency_s": ("end-to-end-latency", 1.0),
    "time_to_first_token_p50_s": ("time-to-first-token-fiftieth-percentile", 1.0),
    "time_to_first_token_p90_s": ("time-to-first-token-ninetieth-percentile", 1.0),
    "time_to_first_token_p99_s": ("time-to-first-token-ninety-ninth-percentile", 1.0),
    "inter_token_latency_p50_s": ("inter-token-latency-fiftieth-percentile", 1.0),
    "inter_token_latency_p90_s": ("inter-token-latency-ninetieth-percentile", 1.0),
    "inter_token_latency_p99_s": ("inter-token-latency-ninety-ninth-percentile", 1.0),
    "end_to_end_latency_p50_s": ("end-to-end-latency-fiftieth-percentile", 1.0),
    "end_to_end_latency_p90_s": ("end-to-end-latency-ninetieth-percentile", 1.0),
    "end_to_end_latency_p99_s": ("end-to-end-latency-ninety-ninth-percentile", 1.0),
}


def render_bencher(side: ExportSide) -> str:
    """Every metric, from one standard uncertainty below to one above."""
    written: dict[str, dict[str, dict[str, float]]] = {}
    for record in side.measured():
        for name, metric, value in iter_values(record):
            measure, factor = BENCHER_MEASURES[name]
            entry = {"value": value * factor}
            if metric.uncertainty is not None:
                entry["lower_value"] = (value - metric.uncertainty) * factor
                entry["upper_value"] = (value + metric.uncertainty) * factor
            written.setdefault(record.id, {})[measure] = entry
    return json.dumps(written, indent=2) + "\n"


# Figures as gauges in the text format of OpenMetrics.

#: The gauge of a metric, without its unit, and the unit.
OPENMETRICS_GAUGES = {
    "energy_j": ("energy", "joules"),
    "energy_per_output_token_j": ("energy_per_output_token", "joules"),
    "energy_per_request_j": ("energy_per_request", "joules"),
    "net_energy_j": ("net_energy", "joules"),
    "prefill_energy_j": ("prefill_energy", "joules"),
    "decode_energy_j": ("decode_energy", "joules"),
    "mean_power_w": ("mean_power", "watts"),
    "duration_s": ("duration", "seconds"),
    "output_tokens_per_s": ("output_rate", "tokens_per_second"),
    "time_to_first_token_s": ("time_to_first_token", "seconds"),
    "inter_token_latency_s": ("inter_token_latency", "seconds"),
    "peak_memory_bytes": ("peak_memory", "bytes"),
    "flops": ("work", "flops"),
    "energy_per_flop_j": ("energy_per_flop", "joules"),
    "steady_energy_per_output_token_j": ("steady_energy_per_output_token", "joules"),
    "steady_output_tokens_per_s": ("steady_output_rate", "tokens_per_second"),
    "requests_per_s": ("request_rate", "requests_per_second"),
    "end_to_end_latency_s": ("end_to_end_latency", "seconds"),
    "time_to_first_token_p50_s": ("time_to_first_token_p50", "seconds"),
    "time_to_first_token_p90_s": ("time_to_first_token_p90", "seconds"),
    "time_to_first_token_p99_s": ("time_to_first_token_p99", "seconds"),
    "inter_token_latency_p50_s": ("inter_token_latency_p50", "seconds"),
    "inter_token_latency_p90_s": ("inter_token_latency_p90", "seconds"),
    "inter_token_latency_p99_s": ("inter_token_latency_p99", "seconds"),
    "end_to_end_latency_p50_s": ("end_to_end_latency_p50", "seconds"),
    "end_to_end_latency_p90_s": ("end_to_end_latency_p90", "seconds"),
    "end_to_end_latency_p99_s": ("end_to_end_latency_p99", "seconds"),
}


def render_openmetrics(sides: Sequence[ExportSide]) -> str:
    """A gauge for each metric and one for its standard uncertainty, labelled by test, side and device."""
    values: dict[str, list[Sample]] = {name: [] for name in OPENMETRICS_GAUGES}
    uncertainties: dict[str, list[Sample]] = {name: [] for name in OPENMETRICS_GAUGES}
    for side in sides:
        for record in side.measured():
            labels = {
                "test": record.id,
                "side": side.name,
                "device": side.device_key(record),
                "kind": record.kind or "",
                "commit": side.report.source.commit or "",
            }
            for name, metric, value in iter_values(record):
                values[name].append(Sample(labels, repr(float(value))))
                if metric.uncertainty is not None:
                    uncertainties[name].append(Sample(labels, repr(metric.uncertainty)))
    families = []
    for name, (gauge, unit) in OPENMETRICS_GAUGES.items():
        about = f"{name} of a test, mean over its valid rounds."
        families.append(Family(f"llenergy_{gauge}_{unit}", about, values[name], unit))
        about = f"Standard uncertainty (k=1) of {name}."
        families.append(Family(f"llenergy_{gauge}_uncertainty_{unit}", about, uncertainties[name], unit))
    return render_openmetrics_text(families)


# The JSON of pytest-benchmark: seconds in ``stats``, energy in ``extra_info``.
#
# Never the other way round: all who read the format take ``stats`` for seconds, and ``ops`` for iterations a
# second of which more is better.


def render_pytest_benchmark(side: ExportSide) -> str:
    """Every test that was measured."""
    report = side.report
    environment = report.environment
    machine = {}
    if environment is not None:
        machine = {
            "node": environment.host.name,
            "machine": environment.host.machine,
            "processor": environment.host.cpu_model,
            "system": environment.host.system,
            "python_version": environment.python,
            "cpu": {"brand_raw": environment.host.cpu_model, "count": environment.host.logical_cpus},
        }
    written = {
        "machine_info": machine,
        "commit_info": {
            "id": report.source.commit,
            "branch": report.source.branch,
            "dirty": report.source.dirty,
            "time": None,
        },
        "benchmarks": [each for record in side.measured() if (each := _benchmark(record)) is not None],
        "datetime": report.run.finished_at or report.run.started_at,
        "version": f"pytest-llenergy {pytest_llenergy.__version__}",
    }
    return json.dumps(written, indent=4) + "\n"


def _benchmark(record: Record) -> dict[str, Any] | None:
    seconds = [each.value for each in values_of("duration_s", record.rounds)[0]]
    if not seconds:
        return None
    path, bracket, params = record.id.partition("[")
    energy: dict[str, Any] = {name: value for name, _, value in iter_values(record) if name != "duration_s"}
    if record.kind is not None:
        energy["energy_kind"] = record.kind
    return {
        "group": None,
        "name": f"{path.rpartition('::')[2]}{bracket}{params}",
        "fullname": record.id,
        "params": record.params or None,
        "param": params.removesuffix("]") or None,
        "extra_info": energy,
        "options": {"disable_gc": False, "timer": "monotonic", "warmup": record.procedure is not None},
        "stats": _stats(seconds, record.procedure.iterations if record.procedure is not None else 1),
    }


def _stats(seconds: Sequence[float], iterations: int) -> dict[str, Any]:
    """The fields of its ``stats.py``. Quartiles are Tukey's hinges: the medians of the halves."""
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


# CSV in long form: a line for each metric of each test.

CSV_COLUMNS = (
    "id",
    "side",
    "run_id",
    "started_at",
    "commit",
    "device_key",
    "kind",
    "status",
    "metric",
    "value",
    "unit",
    "uncertainty",
    "n",
    "reason",
)


def render_csv(sides: Sequence[ExportSide]) -> str:
    """All tests, also those that have no figures: their lines have an empty value, and the reason."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    for side in sides:
        for record in side.records():
            writer.writerows(_lines(side, record))
    return text.getvalue()


def _lines(side: ExportSide, record: Record) -> Iterator[dict[str, object]]:
    run, source = side.report.run, side.report.source
    about: dict[str, object] = {
        "id": record.id,
        "side": side.name,
        "run_id": run.id,
        "started_at": run.started_at,
        "commit": source.commit or "",
        "device_key": side.device_key(record) if record.meters else "",
        "kind": record.kind or "",
        "status": record.status,
        "reason": record.reason or "",
    }
    if not record.metrics:
        yield about
    for name, metric in record.metrics.items():
        yield {
            **about,
            "metric": name,
            "value": "" if metric.value is None else repr(metric.value),
            "unit": metric.unit,
            "uncertainty": "" if metric.uncertainty is None else repr(metric.uncertainty),
            "n": metric.n,
            "reason": metric.reason or record.reason or "",
        }


# Every format that reports can be exported in.

#: Named after those who read them.
Target = Literal["pytest-benchmark", "github-action-benchmark", "bencher", "openmetrics", "csv"]

TARGETS: tuple[Target, ...] = ("pytest-benchmark", "github-action-benchmark", "bencher", "openmetrics", "csv")

#: Those in which both sides of a paired file have a place.
WITH_SIDES: frozenset[Target] = frozenset({"openmetrics", "csv"})


def export_report(sides: Sequence[ExportSide], target: Target) -> str:
    """The text of the file. Formats without a place for sides take one."""
    if target == "openmetrics":
        return render_openmetrics(sides)
    if target == "csv":
        return render_csv(sides)
    (side,) = sides
    if target == "pytest-benchmark":
        return render_pytest_benchmark(side)
    if target == "bencher":
        return render_bencher(side)

    return render_github_action_benchmark(side)
