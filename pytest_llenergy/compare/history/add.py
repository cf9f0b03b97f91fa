# SPDX-License-Identifier: Apache-2.0
"""Add a run to a history, or accept a step change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import log
from statistics import median, quantiles

import msgspec

from pytest_llenergy.compare.comparability import describe_devices, device_facts, fingerprint, workload_key
from pytest_llenergy.compare.history.store import (
    SCHEMA_VERSION,
    SUFFIX,
    TIME,
    Acceptance,
    Entry,
    Store,
    explain_malformed,
    matches_name,
    read_entries,
)
from pytest_llenergy.compare.limits import relative_spread
from pytest_llenergy.compare.metrics import unit_of
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import MALFORMED
from pytest_llenergy.record.metrics import ROUND_METRICS, round_values
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report

#: The folder of accepted steps, next to those of devices.
ACCEPTED_FOLDER = "accepted"

#: Fewest characters of an abbreviated commit.
MIN_COMMIT_LENGTH = 4


@dataclass(frozen=True)
class AddResult:
    """Numbers of tests added and of tests without measurements. ``new`` is false for a run added before."""

    tests: int
    unmeasured: int
    new: bool


def add_run(report: Report, origin: str, store: Store, *, allow_dirty: bool = False) -> AddResult:
    """Add the measurements of a run, by kind of device. Adding a run again changes nothing.

    Args:
        report: The run.
        origin: Name of the report for messages.
        store: The history.
        allow_dirty: Also add a run whose commit is unknown or has uncommitted changes.

    Raises:
        ReportError: If the run is incomplete, measured nothing, or is not of a clean commit.
    """
    _check(report, origin, allow_dirty=allow_dirty)
    records = select_last_attempts(report.records, origin)
    measured = [record for record in records.values() if record.counts and record.rounds]
    lines: dict[str, list[bytes]] = {}
    tests = 0
    for record in measured:
        entries = list(_entries(report, record))
        tests += bool(entries)
        for entry in entries:
            lines.setdefault(entry.device_key, []).append(_encode(entry, origin))
    if not lines:
        raise ReportError(f"{origin}: none of its {len(records)} tests was measured; nothing to add")
    file = file_name(report.run.started_at, report.run.id)
    written = [store.create(key, file, b"".join(found)) for key, found in lines.items()]
    return AddResult(tests, len(records) - tests, new=any(written))


def _encode(entry: Entry, origin: str) -> bytes:
    """Return a line that can be read again: a report may contain values that no machine has."""
    line = msgspec.json.encode(entry) + b"\n"
    try:
        msgspec.json.decode(line, type=Entry)
    except msgspec.ValidationError as error:
        raise ReportError(f"{origin}: {entry.id}: impossible {entry.metric} ({error})") from None
    return line


def file_name(time: str, run_id: str) -> str:
    """Return ``20260102T030405Z-<run id>.jsonl``, which sorts by time and identifies the run."""
    return f"{re.sub('[^0-9TZ]', '', time)}-{re.sub('[^A-Za-z0-9._-]', '-', run_id)}{SUFFIX}"


def _check(report: Report, origin: str, *, allow_dirty: bool) -> None:
    if not report.run.complete:
        raise ReportError(f"{origin}: the run did not finish; a history has only complete runs")
    if not re.search(TIME, report.run.started_at):
        raise ReportError(f"{origin}: started_at is {report.run.started_at!r}, not a time in UTC")
    if allow_dirty:
        return
    if report.source.commit is None:
        raise ReportError(f"{origin}: the commit is unknown; --allow-dirty adds the run anyway")
    if report.source.dirty is not False:
        state = "has uncommitted changes" if report.source.dirty else "may have uncommitted changes"
        raise ReportError(
            f"{origin}: commit {report.source.commit[:10]} {state}, so it cannot be measured again; "
            "--allow-dirty adds the run anyway"
        )


def _entries(report: Report, record: Record) -> Iterator[Entry]:
    device_key = fingerprint(device_facts(record, report.environment))
    device = describe_devices(record, report.environment)
    workload = workload_key(record)
    for metric in (*ROUND_METRICS, *record.custom):
        recorded = record.value_of(metric)
        if metric in ROUND_METRICS:
            values = [each.value for each in round_values(metric, record.rounds)[0]]
        else:
            values = record.custom[metric].values or ([recorded] if recorded is not None else [])
        if not values:
            continue
        quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [None, None, None]
        positive = min(values) > 0
        yield Entry(
            schema_version=SCHEMA_VERSION,
            id=record.id,
            metric=metric,
            unit=unit_of(metric, record),
            value=recorded if recorded is not None else median(values),
            low=quarters[0],
            high=quarters[2],
            noise=relative_spread(sorted(map(log, values))) if positive and len(values) > 1 else None,
            n=len(values),
            time=report.run.started_at,
            commit=report.source.commit,
            branch=report.source.branch,
            dirty=report.source.dirty,
            run_id=report.run.id,
            device_key=device_key,
            device=device,
            workload_key=workload,
            kind=record.kind,
            verdict=next((each.verdict for each in record.comparisons if each.metric == metric), None),
            better=record.custom[metric].better if metric in record.custom else None,
        )


def accept_step(store: Store, commit: str, reason: str, tests: Sequence[str] = ()) -> Acceptance:
    """Accept a step change: later runs are compared with the measurements of this commit.

    Args:
        store: The history.
        commit: The commit, possibly abbreviated.
        reason: Why the change is accepted.
        tests: Ids of tests, or the part after ``::``; all tests if empty.

    Raises:
        ReportError: If the commit or a test was not measured, or the commit is ambiguous.
    """
    if not reason.strip():
        raise ReportError("--reason is empty; state why the change is accepted")
    if len(commit) < MIN_COMMIT_LENGTH:
        raise ReportError(f"commit {commit!r} is too short; give at least {MIN_COMMIT_LENGTH} characters")
    entries = read_entries(store)
    known = sorted({entry.commit for entry in entries if entry.commit is not None})
    matches = [each for each in known if each.startswith(commit)]
    if not matches:
        raise ReportError(f"{store.name}: no session is of commit {commit}; llenergy history add adds one")
    if len(matches) > 1:
        raise ReportError(
            f"{store.name}: {commit} abbreviates {len(matches)} commits with sessions; give more letters"
        )
    measured = list(dict.fromkeys(entry.id for entry in entries if entry.commit == matches[0]))
    named = {each: [name for name in measured if matches_name(name, each)] for each in tests}
    for each, names in named.items():
        if not names:
            raise ReportError(f"{store.name}: no session of commit {matches[0][:10]} has {each}")
    now = datetime.now(timezone.utc)
    stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    accepted = Acceptance(
        schema_version=SCHEMA_VERSION,
        commit=matches[0],
        tests=[name for names in named.values() for name in names],
        reason=reason.strip(),
        time=stamp,
    )
    file = f"{now:%Y%m%dT%H%M%S%f}Z-{matches[0][:12]}{SUFFIX}"
    if not store.create(ACCEPTED_FOLDER, file, msgspec.json.encode(accepted) + b"\n"):
        raise ReportError(f"{store.name}: {file} already exists; try again")
    return accepted


def load_accepted_steps(store: Store) -> list[Acceptance]:
    """Load the accepted steps in order of time.

    Raises:
        ReportError: If a file is broken.
    """
    found = []
    for file in store.files(ACCEPTED_FOLDER):
        data = store.read(ACCEPTED_FOLDER, file)
        try:
            found.append(msgspec.json.decode(data, type=Acceptance))
        except MALFORMED as error:
            reason = explain_malformed(data, error, "accepted step")
            raise ReportError(f"{store.name}/{ACCEPTED_FOLDER}/{file}: {reason}") from None
    return sorted(found, key=lambda each: each.time)
