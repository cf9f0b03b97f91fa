# SPDX-License-Identifier: Apache-2.0
"""Join the sessions of each side into one report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pytest_llenergy.compare.comparability import device_differences
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.record.custom_metrics import join_custom
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Flag, Record, Round, flag_kind
from pytest_llenergy.record.report import Report


@dataclass(frozen=True)
class SessionRecord:
    """The record of one test in one session; ``number`` counts all sessions from 1."""

    number: int
    record: Record
    environment: Environment | None

    @property
    def usable(self) -> bool:
        """Whether the test ran as it should, even if its rounds are not valid measurements."""
        record = self.record
        return record.counts or (record.status == "invalid" and bool(record.rounds) and not record.is_spoiled)


class SideSessions:
    """The measurements of one side so far, in session order; ``parts`` has the sessions of each test."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.parts: dict[str, list[SessionRecord]] = {}

    def add(self, number: int, report: Report) -> None:
        """Add a session."""
        self.reports.append(report)
        for name, record in select_last_attempts(report.records, report.run.id).items():
            self.parts.setdefault(name, []).append(SessionRecord(number, record, report.environment))

    @property
    def undecidable(self) -> set[str]:
        """Tests that failed, were skipped or crashed, or have no rounds: more sessions would not help."""
        return {
            name for name, parts in self.parts.items() if not parts[-1].usable or not parts[-1].record.rounds
        }

    def join(self) -> Report:
        """Join all sessions into one report; there must be one."""
        first, last = self.reports[0], self.reports[-1]
        statuses = [each.run.exit_status for each in self.reports if each.run.exit_status is not None]
        run = msgspec.structs.replace(
            first.run,
            finished_at=last.run.finished_at,
            # An unfinished session stops the comparison.
            complete=True,
            exit_status=max(statuses, default=None),
        )
        records = [_join_record(parts) for parts in self.parts.values()]
        return msgspec.structs.replace(first, run=run, records=records, baseline=None)


def choose_anchor(parts: Sequence[SessionRecord]) -> SessionRecord:
    """Return the session of a test whose devices and meters all others must match: the first usable one."""
    return next((part for part in parts if part.usable), parts[0])


def _join_record(parts: Sequence[SessionRecord]) -> Record:
    """Join the sessions of one test. Budgets do not count: the verdict says whether more is used."""
    anchor = choose_anchor(parts)
    rounds = [round_ for part in parts for round_ in _mark_rounds(part, anchor)]
    spoiled = next((part for part in parts if not part.usable), None)
    if spoiled is not None:
        return msgspec.structs.replace(
            spoiled.record,
            attempt=1,
            # Measured in other sessions, so it is no test that never worked, and may not pass as new or
            # removed.
            status="invalid" if anchor.usable else spoiled.record.status,
            reason=f"session {spoiled.number}: {spoiled.record.reason or spoiled.record.status}",
            rounds=rounds,
            # They summarize rounds that do not count.
            metrics={},
            custom={},
            comparisons=[],
            failed_gate=False,
        )
    first = parts[0].record
    if not rounds:
        return msgspec.structs.replace(first, failed_gate=False)
    metrics = compute_metrics(rounds, None, min((meter.coverage for meter in first.meters), default=1.0))
    energy = metrics["energy_j"]
    if "peak_memory_bytes" in first.metrics:
        # It belongs to no round; that of any session will do.
        metrics["peak_memory_bytes"] = first.metrics["peak_memory_bytes"]
    added, custom = join_custom([part.record for part in parts])
    return msgspec.structs.replace(
        first,
        attempt=1,
        status="invalid" if energy.value is None else "measured",
        reason=energy.reason,
        # Those of one session would be taken for all.
        times=None,
        rounds=rounds,
        metrics=metrics | added,
        custom=custom,
        comparisons=[],
        failed_gate=False,
        flags=list({flag_kind(flag): flag for part in parts for flag in part.record.flags}.values()),
    )


def _mark_rounds(part: SessionRecord, anchor: SessionRecord) -> list[Round]:
    """Return the rounds with their session, flagged as invalid if they do not match the anchor."""
    why = _incompatibility(part, anchor)
    added = (
        [Flag(name="elsewhere", severity="invalid", detail=f"session {part.number}: {why}")] if why else []
    )
    return [
        msgspec.structs.replace(each, flags=[*each.flags, *added], session=part.number)
        for each in part.record.rounds
    ]


def _incompatibility(part: SessionRecord, anchor: SessionRecord) -> str:
    """Why a session does not match the anchor; empty if it does."""
    devices = [", ".join(sorted(each.record.devices)) or "no device" for each in (part, anchor)]
    if devices[0] != devices[1]:
        return f"ran on {devices[0]}, session {anchor.number} on {devices[1]}"
    if part.environment == anchor.environment and part.record.meters == anchor.record.meters:
        return ""
    found = device_differences(anchor.record, part.record, anchor.environment, part.environment)
    return f"differs from session {anchor.number} ({'; '.join(found)})" if found else ""


def list_excluded_rounds(record: Record) -> list[str]:
    """Return why rounds of a joined record were excluded from the comparison."""
    flags = (flag for each in record.rounds for flag in each.flags if flag.name == "elsewhere")
    return [flag.detail for flag in flags if flag.severity == "invalid"]
