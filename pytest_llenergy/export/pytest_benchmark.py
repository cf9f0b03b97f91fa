# SPDX-License-Identifier: Apache-2.0
"""The JSON of pytest-benchmark: seconds in ``stats``, energy in ``extra_info``.

Never the other way round: all who read the format take ``stats`` for seconds, and ``ops`` for iterations a
second of which more is better.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

import pytest_llenergy
from pytest_llenergy.export.sides import Side, figures
from pytest_llenergy.measure.metrics import values_of
from pytest_llenergy.model.record import Record


def pytest_benchmark(side: Side) -> str:
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
    energy: dict[str, Any] = {name: value for name, _, value in figures(record) if name != "duration_s"}
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
