# SPDX-License-Identifier: Apache-2.0
"""Which records of two reports belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_llenergy.errors import ReportError
from pytest_llenergy.measure.metrics import applies
from pytest_llenergy.model.comparison import Side
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report

PER_TOKEN, PER_ITERATION = "energy_per_output_token_j", "energy_j"


def last_attempts(records: Sequence[Record], origin: str) -> dict[str, Record]:
    """The record of the last attempt of each test, by id: a rerun replaces what was before it.

    Raises ``ReportError`` for an attempt that is there twice: which of them counts would be chance.
    """
    found: dict[str, Record] = {}
    attempts: dict[str, set[int]] = {}
    for record in records:
        known = len(found)
        before = found.setdefault(record.id, record)
        if len(found) > known:
            continue
        seen = attempts.setdefault(record.id, {before.attempt})
        if record.attempt in seen:
            raise ReportError(
                f"{origin}: {record.id} is there twice (attempt {record.attempt}); "
                "make one report a run, or join them with llenergy merge"
            )
        seen.add(record.attempt)
        if record.attempt > before.attempt:
            found[record.id] = record
    return found


def pairs(
    base: Mapping[str, Record], head: Mapping[str, Record]
) -> Iterator[tuple[Record | None, Record | None]]:
    """The records of every test of either side: those of ``head`` first, in their order."""
    for name, record in head.items():
        yield base.get(name), record
    for name, record in base.items():
        if name not in head:
            yield record, None


def usual_metric(*records: Record | None) -> str:
    """Joules per output token where every side counts tokens, joules otherwise."""
    known = [record for record in records if record is not None and record.rounds]
    if known and all(applies(PER_TOKEN, record.rounds) for record in known):
        return PER_TOKEN
    return PER_ITERATION


def measured_something(records: Mapping[str, Record]) -> bool:
    """Whether there is a test to compare with."""
    return any(record.counts and record.rounds for record in records.values())


def side_of(report: Report, origin: str) -> Side:
    """Where a report comes from."""
    return Side(
        origin=origin,
        run_id=report.run.id,
        started_at=report.run.started_at,
        complete=report.run.complete,
        commit=report.source.commit,
        branch=report.source.branch,
        dirty=report.source.dirty,
    )
