# SPDX-License-Identifier: Apache-2.0
"""Find the record of each test in two reports: its last attempt, its id, and the id that it had before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pytest_llenergy.compare.comparability import workload_key
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Record

#: Workload and code of a test, which a new name leaves as they are.
Work = tuple[str, str | None]


def select_last_attempts(records: Sequence[Record], origin: str) -> dict[str, Record]:
    """Return the record of the last attempt of each test, by id: a rerun replaces earlier attempts.

    Raises:
        ReportError: If an attempt has two records, since choosing one would be arbitrary.
    """
    last: dict[str, Record] = {}
    attempts: dict[str, set[int]] = {}
    for record in records:
        before = last.get(record.id)
        if before is None:
            last[record.id] = record
            continue
        numbers = attempts.setdefault(record.id, {before.attempt})
        if record.attempt in numbers:
            raise ReportError(
                f"{origin}: {record.id} has two records of attempt {record.attempt}; write one report per "
                "run, or combine runs with llenergy merge"
            )
        numbers.add(record.attempt)
        if record.attempt > before.attempt:
            last[record.id] = record
    return last


def pair_records(
    base: Mapping[str, Record], head: Mapping[str, Record]
) -> Iterator[tuple[Record | None, Record | None]]:
    """Pair records by test id: first all of the head in their order, then those of the baseline alone."""
    for name, record in head.items():
        yield base.get(name), record
    for name, record in base.items():
        if name not in head:
            yield record, None


def match_renamed(base: Mapping[str, Record], head: Mapping[str, Record]) -> dict[str, str]:
    """Find tests that have another id in the baseline: the id of the baseline by that of the head."""
    removed = group_by_work(record for name, record in base.items() if name not in head)
    new = group_by_work(record for name, record in head.items() if name not in base)
    found = {
        records[0].id: find_renamed(records[0], removed) for records in new.values() if len(records) == 1
    }
    return {name: old.id for name, old in found.items() if old is not None}


def group_by_work(records: Iterable[Record]) -> dict[Work, list[Record]]:
    """Group measured tests by workload and code."""
    groups: dict[Work, list[Record]] = {}
    for record in records:
        if record.counts and record.rounds:
            groups.setdefault(_work(record), []).append(record)
    return groups


def find_renamed(head: Record, removed: Mapping[Work, Sequence[Record]]) -> Record | None:
    """Return the only removed test with the work of a new one, if there is one.

    Where the baseline lacks digests of code, the workload must have a backend: others are hardly distinct.
    """
    workload, _ = _work(head)
    candidates = removed.get(_work(head)) or (removed.get((workload, None), ()) if head.backend else ())
    return candidates[0] if len(candidates) == 1 else None


def _work(record: Record) -> Work:
    return workload_key(msgspec.structs.replace(record, id="")), record.source_digest


def rename_records(records: Mapping[str, Record], renamed: Mapping[str, str]) -> dict[str, Record]:
    """Give records of the baseline their ids on the head: ``renamed`` has the old ids by the new ones."""
    names = {old: new for new, old in renamed.items()}
    return {
        names.get(name, name): msgspec.structs.replace(record, id=names[name]) if name in names else record
        for name, record in records.items()
    }


def mark_renamed(comparison: Comparison, renamed: Mapping[str, str]) -> Comparison:
    """Note the id in the baseline if the test was renamed."""
    old = renamed.get(comparison.id)
    if old is None:
        return comparison
    notes = [f"renamed from {old}", *comparison.notes]
    return msgspec.structs.replace(comparison, renamed_from=old, notes=notes)
