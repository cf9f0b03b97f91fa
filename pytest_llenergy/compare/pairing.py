# SPDX-License-Identifier: Apache-2.0
"""Find the record of each test in two reports: its last attempt, its id, and the id that it had before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pytest_llenergy.compare.comparability import workload_key
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.record import Record

#: Parts of ids that differ in every run: addresses, UUIDs, long numbers such as times, dates.
CHANGING = re.compile(
    r"0x[0-9a-f]{3,}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\b[0-9a-f]{32}\b|\d{9,}(?:\.\d+)?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d[^\]-]*",
    re.IGNORECASE,
)


def select_last_attempts(records: Sequence[Record], origin: str) -> dict[str, Record]:
    """Return the record of the last attempt of each test, by id: a rerun replaces earlier attempts.

    Raises:
        ReportError: If an attempt has two records, since choosing one would be arbitrary.
    """
    last: dict[str, Record] = {}
    seen: set[tuple[str, int]] = set()
    for record in records:
        if (record.id, record.attempt) in seen:
            raise ReportError(
                f"{origin}: {record.id} has two records of attempt {record.attempt}; write one report per "
                "run, or combine runs with llenergy merge"
            )
        seen.add((record.id, record.attempt))
        if record.id not in last or record.attempt > last[record.id].attempt:
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
    """Find tests that have another id in the baseline: the id of the baseline by that of the head.

    Only a test with the workload and code of exactly one test of the other side is the same one. Where the
    baseline has no digests of code, the workload must have a backend: others are hardly distinct.
    """
    removed = _group_by_work(record for name, record in base.items() if name not in head)
    new = _group_by_work(record for name, record in head.items() if name not in base)
    found = {}
    for (workload, code), heads in new.items():
        bases = removed.get((workload, code)) or (
            removed.get((workload, None), []) if heads[0].backend else []
        )
        if len(heads) == len(bases) == 1:
            found[heads[0].id] = bases[0].id
    return found


def _group_by_work(records: Iterable[Record]) -> dict[tuple[str, str | None], list[Record]]:
    """Group measured tests by workload and code."""
    groups: dict[tuple[str, str | None], list[Record]] = {}
    for record in records:
        if record.counts and record.rounds:
            workload = workload_key(msgspec.structs.replace(record, id=""))
            groups.setdefault((workload, record.source_digest), []).append(record)
    return groups


def rename_records(records: Mapping[str, Record], renamed: Mapping[str, str]) -> dict[str, Record]:
    """Give records of the baseline their ids on the head: ``renamed`` has the old ids by the new ones."""
    names = {old: new for new, old in renamed.items()}
    return {
        names.get(name, name): msgspec.structs.replace(record, id=names[name]) if name in names else record
        for name, record in records.items()
    }


def describe_changing_ids(base: Iterable[str], head: Iterable[str]) -> list[str]:
    """Return a line about tests of one side only whose ids differ by what changes in every run, if any."""
    sides = [{CHANGING.sub("…", name): name for name in names} for names in (base, head)]
    alike = [name for pattern, name in sides[1].items() if sides[0].get(pattern, name) != name]
    if not alike:
        return []
    found = CHANGING.search(alike[0])
    part = found.group() if found is not None else ""
    return [
        f"ids that change in each run cannot be paired, such as {alike[0]} with {part}; give its parameters "
        "ids: pytest.mark.parametrize(…, ids=…)"
    ]
