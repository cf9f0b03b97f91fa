# SPDX-License-Identifier: Apache-2.0
"""Find the records of a test in two reports, or within one: by its id or its parameters."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import did_you_mean

#: Parts of ids that differ in every run: addresses, UUIDs, long numbers such as times, dates.
CHANGING = re.compile(
    r"0x[0-9a-f]{3,}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\b[0-9a-f]{32}\b|\d{9,}(?:\.\d+)?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d[^\]-]*",
    re.IGNORECASE,
)

#: A test function and some of its parameters.
Group = tuple[str, tuple[tuple[str, Primitive], ...]]


def select_last_attempts(records: Sequence[Record], origin: str) -> dict[str, Record]:
    """Return the record of the last attempt of each test, by id: a rerun replaces earlier attempts."""
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


def describe_changing_ids(base: Iterable[str], head: Iterable[str]) -> list[str]:
    """Return a line about tests of one side only whose ids differ by what changes in every run, if any."""
    sides = [{CHANGING.sub("…", name): name for name in names} for names in (base, head)]
    for pattern, name in sides[1].items():
        part = CHANGING.search(name)
        if part is not None and pattern in sides[0]:
            return [
                f"ids that change in each run cannot be paired, such as {name} with {part.group()}; give its "
                "parameters ids: pytest.mark.parametrize(…, ids=…)"
            ]
    return []


def pair_by_parameters(
    base: Mapping[str, Record], head: Mapping[str, Record]
) -> tuple[dict[str, str], dict[str, str]]:
    """Pair the tests of two sets of options by id, or else by the parameters that both sides have.

    A parameter of a function that has no value in common on the two sides, such as a dtype, was changed by
    the options. Tests that are alike in all others are a pair if they are the only ones, and are named by
    these: ``test_decode[8]``.

    Returns:
        For each side the common name of each test, by its id.
    """
    names = {name: name for name in base}, {name: name for name in head}
    rest = (
        [record for name, record in base.items() if name not in head],
        [record for name, record in head.items() if name not in base],
    )
    for function in dict.fromkeys(_function_of(record) for side in rest for record in side):
        sides = [[record for record in side if _function_of(record) == function] for side in rest]
        known = {name for side in sides for record in side for name in record.params}
        values = [{name: {each.params.get(name) for each in side} for name in known} for side in sides]
        changed = {name for name in known if values[0][name].isdisjoint(values[1][name])}
        before, after = (_group_by_parameters(side, changed) for side in sides)
        for group in before.keys() & after.keys():
            shared = f"{function}[{'-'.join(str(value) for _, value in group[1])}]" if group[1] else function
            if len(before[group]) == len(after[group]) == 1 and shared not in names[0] | names[1]:
                names[0][before[group][0].id] = names[1][after[group][0].id] = shared
    return names


def split_by_parameter(report: Report, origin: str, text: str) -> tuple[Report, Report]:
    """Return the tests with the first value of a parameter, and those with its other values, under one id.

    Tests of one function that are alike in all other parameters are paired. What else differs is a note of
    their comparison.
    """
    name, _, wanted = text.partition("=")
    records = select_last_attempts(report.records, origin).values()
    groups = _group_by_parameters((record for record in records if name in record.params), {name})
    if not groups:
        known = {key for record in records for key in record.params}
        hint = did_you_mean([name], known) or f"parameters: {', '.join(sorted(known)) or 'none'}"
        raise PlanError(f"{origin}: no test has the parameter {name}; {hint}")
    sides: tuple[list[Record], list[Record]] = [], []
    for (function, rest), found in groups.items():
        by_value = {str(record.params[name]): record for record in found}
        first = wanted or next(iter(by_value))
        for value, record in by_value.items():
            if first in by_value and value != first:
                shared = [f"{first} -> {value}", *(f"{key}={each}" for key, each in rest)]
                changes = {"id": f"{function}[{', '.join(shared)}]", "attempt": 1, "params": dict(rest)}
                for side, each in zip(sides, (by_value[first], record), strict=True):
                    side.append(msgspec.structs.replace(each, **changes))
    if not sides[0]:
        raise PlanError(f"{origin}: no two tests differ in {text} alone")
    base, head = (msgspec.structs.replace(report, records=side) for side in sides)
    return base, head


def _function_of(record: Record) -> str:
    return record.id.partition("[")[0]


def _group_by_parameters(records: Iterable[Record], without: Container[str]) -> dict[Group, list[Record]]:
    """Group tests of one function that are alike in all parameters but these."""
    groups: dict[Group, list[Record]] = {}
    for record in records:
        rest = tuple((name, value) for name, value in sorted(record.params.items()) if name not in without)
        groups.setdefault((_function_of(record), rest), []).append(record)
    return groups
