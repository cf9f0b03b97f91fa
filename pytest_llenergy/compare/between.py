# SPDX-License-Identifier: Apache-2.0
"""Compare the values of one parameter within a run, such as two number types.

Tests of one function that are alike in all other parameters are paired: a report of the first value is
compared with a report of each other value. What else differs is a note of the comparison.
"""

from __future__ import annotations

import msgspec

from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import did_you_mean


def split_by_parameter(report: Report, origin: str, text: str) -> tuple[Report, Report]:
    """Return the tests with the first value of a parameter, and those with its other values, under one id.

    Args:
        report: The run.
        origin: Its name for messages.
        text: Name of the parameter; ``NAME=VALUE`` chooses the value to compare with.

    Raises:
        PlanError: If no two tests differ in this parameter alone.
    """
    name, _, wanted = text.partition("=")
    records = select_last_attempts(report.records, origin).values()
    groups: dict[str, list[Record]] = {}
    for record in records:
        if name in record.params:
            rest = {key: value for key, value in record.params.items() if key != name}
            groups.setdefault(f"{record.id.partition('[')[0]} {rest}", []).append(record)
    if not groups:
        known = {key for record in records for key in record.params}
        hint = did_you_mean([name], known) or f"parameters: {', '.join(sorted(known)) or 'none'}"
        raise PlanError(f"{origin}: no test has the parameter {name}; {hint}")
    sides: tuple[list[Record], list[Record]] = [], []
    for group in groups.values():
        chosen = (each for each in group if wanted in ("", str(each.params[name])))
        first = next(chosen, None)
        values = {str(each.params[name]): each for each in group if first is not None}
        for value, other in values.items():
            if first is not None and value != str(first.params[name]):
                label = _label(first, name, value)
                for side, record in zip(sides, (first, other), strict=True):
                    params = {key: each for key, each in record.params.items() if key != name}
                    side.append(msgspec.structs.replace(record, id=label, attempt=1, params=params))
    if not sides[0]:
        raise PlanError(f"{origin}: no two tests differ in {text} alone")
    base, head = (msgspec.structs.replace(report, records=side) for side in sides)
    return base, head


def _label(base: Record, name: str, value: str) -> str:
    """Return an id such as ``test_decode[float32 -> bfloat16, batch_size=8]``."""
    rest = [f"{key}={each}" for key, each in base.params.items() if key != name]
    return f"{base.id.partition('[')[0]}[{', '.join([f'{base.params[name]} -> {value}', *rest])}]"
