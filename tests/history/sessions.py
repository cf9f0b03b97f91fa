# SPDX-License-Identifier: Apache-2.0
"""Build one report a day for a history."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import Report

from ..compare.runs import record_of, report_of, scaled


def session(day: int, *records: Record, **changes: Any) -> Report:
    """A clean run of the ``day``-th day of a year; its commit is derived from the number."""
    report = report_of(*records, **changes)
    run = msgspec.structs.replace(
        report.run, id=f"run-{day}", started_at=f"2026-{1 + day // 28:02}-{1 + day % 28:02}T03:04:05Z"
    )
    source = msgspec.structs.replace(report.source, commit=commit(day), dirty=False)
    return msgspec.structs.replace(report, run=run, source=source)


def day_of(day: int, factor: float = 1.0, **changes: Any) -> Report:
    """A session of the usual test that takes ``factor`` as much as usual."""
    return session(day, record_of(joules=scaled(factor), **changes))


def commit(day: int) -> str:
    return f"{day:04}" + "c" * 36
