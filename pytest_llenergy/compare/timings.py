# SPDX-License-Identifier: Apache-2.0
"""The JSON of pytest-benchmark as reports: seconds without energy, of one session or of several.

Several sessions of a side become one report whose rounds are the sessions' medians. The scatter of these
rounds then shows how much sessions differ, which the rounds of a single session cannot show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from pytest_llenergy.compare.comparability import MeasuredRecord
from pytest_llenergy.compare.history import StoredEstimator
from pytest_llenergy.compare.rule import NEEDS_SESSIONS, Rule
from pytest_llenergy.compare.statistics import MIN_ROUNDS, Estimate, Sample, compare_samples
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.environment import Environment, Host, environment_key
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool

#: ``tool.name`` of such a report, and the metric that it has.
TOOL, SECONDS = "pytest-benchmark", "duration_s"

#: A session has thousands of rounds that follow each other: the medians of so many stretches stand for them.
MOST_ROUNDS = 50


def is_timings(data: bytes) -> bool:
    """Whether the data looks like the JSON of pytest-benchmark, which begins with the machine."""
    return data[:200].lstrip().startswith(b"{") and b'"machine_info"' in data[:200]


def decode_timings(data: bytes, origin: str) -> Report:
    """Decode the JSON of one session. A test without the data of its rounds has one round, the median."""
    try:
        content = json.loads(data)
        machine, commit, day = content["machine_info"], content["commit_info"], content["datetime"]
        cpu = machine.get("cpu", {})
        host = Host(
            name=machine.get("node", ""),
            system=machine.get("system", ""),
            machine=machine.get("machine", ""),
            cpu_model=cpu.get("brand_raw", "unknown"),
            logical_cpus=cpu.get("count", 0),
            memory_bytes=0,
            load_average=None,
        )
        records = [
            _record(each["fullname"], each.get("params") or {}, _list_rounds(each["stats"]))
            for each in content["benchmarks"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReportError(f"{origin}: not the JSON of pytest-benchmark ({error!r})") from None
    known = commit.get("id") not in (None, "unversioned")
    return Report(
        schema_version=SCHEMA_VERSION,
        tool=Tool(name=TOOL, version=""),
        run=RunInfo(
            id=hashlib.sha256(data).hexdigest()[:12],
            started_at=day,
            finished_at=day,
            complete=True,
            argv=[],
            exit_status=None,
        ),
        source=Source(
            commit=commit["id"] if known else None, branch=commit.get("branch"), dirty=commit.get("dirty")
        ),
        environment=Environment(
            key=environment_key(host, []),
            host=host,
            gpus=[],
            driver=None,
            python=machine.get("python_version", ""),
            packages={},
        ),
        records=records,
    )


def _list_rounds(stats: dict[str, Any]) -> list[float]:
    """Return the seconds of rounds; of thousands, the medians of stretches."""
    data = [float(each) for each in stats.get("data", ())]
    count = len(data)
    if count <= MOST_ROUNDS:
        return data or [float(stats["median"])]
    borders = [place * count // MOST_ROUNDS for place in range(MOST_ROUNDS + 1)]
    return [median(data[start:end]) for start, end in pairwise(borders)]


def _record(name: str, params: dict[str, Any], seconds: Sequence[float], *, sessions: bool = False) -> Record:
    rounds = [
        Round(
            start_s=0.0,
            duration_s=each,
            energy_j=None,
            energy_u_j=None,
            energy_u_absolute_j=None,
            session=number if sessions else None,
            reason="pytest-benchmark measures seconds",
        )
        for number, each in enumerate(seconds, 1)
    ]
    # Functions and objects are told apart by the name of the test: their texts have an address.
    plain: dict[str, Primitive] = {
        key: each if isinstance(each, str | int | float) else repr(each)
        for key, each in params.items()
        if not str(each).startswith("UNSERIALIZABLE[")
    }
    found = {SECONDS: compute_metrics(rounds, None)[SECONDS]}
    return Record(id=name, attempt=1, status="measured", params=plain, rounds=rounds, metrics=found)


def join_sessions(files: Sequence[tuple[str, bytes]]) -> Report:
    """Join sessions of one commit into a report in which each session is a round."""
    reports = [decode_timings(data, name) for name, data in files]
    first = reports[0]
    seconds: dict[str, list[float]] = {}
    params: dict[str, dict[str, Any]] = {}
    for (name, _), report in zip(files, reports, strict=True):
        sides = report.environment and report.environment.key, report.source.commit
        if sides != (first.environment and first.environment.key, first.source.commit):
            raise ReportError(f"{name} is of another machine or commit than {files[0][0]}")
        for record in report.records:
            seconds.setdefault(record.id, []).append(record.metrics[SECONDS].value or 0.0)
            params[record.id] = record.params
    ids = [each.run.id for each in reports]
    for place, (name, _) in enumerate(files):
        if (earlier := ids.index(ids[place])) < place:
            raise ReportError(f"{name} is a copy of {files[earlier][0]}; each session counts once")
    starts = [each.run.started_at for each in reports]
    run = msgspec.structs.replace(
        first.run,
        id=hashlib.sha256("".join(sorted(ids)).encode()).hexdigest()[:12],
        started_at=min(starts),
        finished_at=max(starts),
    )
    records = [_record(name, params[name], values, sessions=True) for name, values in seconds.items()]
    return msgspec.structs.replace(first, run=run, records=records)


class TimingsEstimator(StoredEstimator):
    """Compares sessions with sessions; a single session a side decides only if it is known how they differ.

    That is known from a floor, or from the history.
    """

    def __call__(self, head: MeasuredRecord, base: Sample, new: Sample, rule: Rule, metric: str) -> Estimate:
        counts = len(base.values), len(new.values)
        if head.record.rounds[0].session is not None:
            estimate = compare_samples(base, new, rule)
            few = f"{counts[0]} base and {counts[1]} head sessions; a verdict needs {MIN_ROUNDS} of each"
        else:
            estimate = super().__call__(head, base, new, rule, metric)
            few = "no data of rounds, which --benchmark-json and --benchmark-save-data write"
        if estimate.verdict != "invalid" or estimate.ratio is None:
            return estimate
        return estimate.changed_to("inconclusive", f"{NEEDS_SESSIONS}: {few}")
