# SPDX-License-Identifier: Apache-2.0
"""Build reports to compare from the energies of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Flag, Record, Round, Tokens
from pytest_llenergy.record.report import Report

from ..record.reports import RECORD, REPORT

#: Joules of six rounds, without a trend and hardly scattered.
LEVEL = (10.0, 10.02, 9.97, 10.01, 9.98, 10.02)

#: The same on average, and too scattered for a verdict.
UNSURE = (8.0, 12.5, 8.1, 12.4, 7.9, 12.6)

TEST = "benchmarks/test_decode.py::test_decode[8]"

#: Each report is of another run.
RUN_NUMBERS = count(1)

SPOILED = Flag(name="doubtful", severity="invalid", detail="the counter ran backwards")


def scaled(factor: float, level: Sequence[float] = LEVEL) -> tuple[float, ...]:
    return tuple(value * factor for value in level)


def round_of(energy_j: float | None, u_j: float = 0.001, **changes: Any) -> Round:
    made = Round(
        start_s=1.0,
        duration_s=2.0,
        energy_j=energy_j,
        energy_u_j=u_j if energy_j is not None else None,
        energy_u_absolute_j=1.0 if energy_j is not None else None,
        iterations=2,
        tokens=Tokens(input=30, output=16),
        requests=4,
        reason=None if energy_j is not None else "the counter stood still",
    )
    return msgspec.structs.replace(made, **changes)


def record_of(name: str = TEST, joules: Sequence[float | None] = LEVEL, **changes: Any) -> Record:
    rounds: list[Round] = changes.pop("rounds", [round_of(each) for each in joules])
    metrics = changes.pop("metrics", None)
    made = msgspec.structs.replace(RECORD, id=name, rounds=rounds, windows=[], flags=[])
    made = msgspec.structs.replace(
        made, metrics=compute_metrics(rounds, None) if metrics is None else metrics
    )
    return msgspec.structs.replace(made, **changes)


def report_of(*records: Record, **changes: Any) -> Report:
    name = f"run-{next(RUN_NUMBERS)}"
    run = msgspec.structs.replace(REPORT.run, id=name, complete=changes.pop("complete", True))
    return msgspec.structs.replace(REPORT, run=run, records=list(records), **changes)
