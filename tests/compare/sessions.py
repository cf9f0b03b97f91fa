# SPDX-License-Identifier: Apache-2.0
"""Build one report a day for a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llenergy.compare.history import SCHEMA_VERSION, Entry, Series
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report

from .runs import record_of, report_of, scaled


def session(day: int, *records: Record, **changes: Any) -> Report:
    """A clean run of the ``day``-th day of a year; its commit is derived from the number."""
    report = report_of(*records, **changes)
    run = msgspec.structs.replace(report.run, id=f"run-{day}", started_at=time_of(day))
    source = msgspec.structs.replace(report.source, commit=commit(day), dirty=False)
    return msgspec.structs.replace(report, run=run, source=source)


def day_of(day: int, factor: float = 1.0, **changes: Any) -> Report:
    """A session of the usual test that takes ``factor`` as much as usual."""
    return session(day, record_of(joules=scaled(factor), **changes))


def time_of(day: int) -> str:
    return f"2026-{1 + day // 28:02}-{1 + day % 28:02}T03:04:05Z"


def commit(day: int) -> str:
    return f"{day:04}" + "c" * 36


def series_of(values: Sequence[float], **changes: str) -> Series:
    """A series with one session a day, without reports."""
    entries = [
        Entry(
            schema_version=SCHEMA_VERSION,
            id="t.py::t",
            metric="energy_j",
            unit="J",
            value=value,
            time=time_of(place),
            commit=commit(place),
            run_id=f"run-{place}",
            device_key="0" * 12,
            device="1x NVIDIA H100",
            workload_key="w",
        )
        for place, value in enumerate(values)
    ]
    return [msgspec.structs.replace(entry, **changes) for entry in entries]
