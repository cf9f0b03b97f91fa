# SPDX-License-Identifier: Apache-2.0
"""Reports as a comparison needs them: without what it does not look at, which is half of the memory.

The same fields are there and no others may be; only what is inside the left-out ones is not looked at. Such
records are for reading alone: written, they would be broken. mypy is told to ignore each field that is left
out: another type in the place of a field's own is the very point.
"""

from __future__ import annotations

from typing import cast

import msgspec

from pytest_llenergy.model.record import Record, Round
from pytest_llenergy.model.report import Report, decode_as


class Unread(msgspec.Struct, frozen=True, gc=False):
    """Stands for any object."""


class LeanMetric(msgspec.Struct, frozen=True, gc=False):
    """Its value alone."""

    value: float | None


class LeanRound(Round, frozen=True):
    """Without its domains."""

    by_domain: Unread = Unread()  # type: ignore[assignment]


class LeanRecord(Record, frozen=True):
    """Without how it was measured, its windows, and what was made of it before."""

    procedure: Unread | None = None  # type: ignore[assignment]
    rounds: list[LeanRound] = []  # type: ignore[assignment]
    windows: list[Unread] = []  # type: ignore[assignment]
    metrics: dict[str, LeanMetric] = {}  # type: ignore[assignment]
    power_trace: Unread | None = None  # type: ignore[assignment]
    comparisons: list[Unread] = []  # type: ignore[assignment]


class LeanReport(Report, frozen=True):
    """Of such records."""

    records: list[LeanRecord]  # type: ignore[assignment]


def decode_lean(data: bytes, origin: str) -> Report:
    """Read a report as strictly as ``decode`` does, but for what is left out. Raises ``ReportError``."""
    return cast(Report, decode_as(LeanReport, data, origin))
