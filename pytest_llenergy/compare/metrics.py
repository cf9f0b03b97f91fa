# SPDX-License-Identifier: Apache-2.0
"""The metrics that can be gated: their units, and which direction is better."""

from __future__ import annotations

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.metrics import BUILT_IN as METRICS
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.record import Record

__all__ = ["METRICS", "direction_of", "unit_of"]


def unit_of(metric: str, *records: Record | None) -> str:
    """Return the unit in which records have a metric, built-in or custom; empty if none has it."""
    if metric in ROUND_METRICS:
        return ROUND_METRICS[metric].unit
    found = (record.metrics[metric].unit for record in records if record and metric in record.metrics)
    return next(found, "")


def direction_of(metric: str, *records: Record | None) -> Direction:
    """Return the direction of a metric that is better; that of a custom metric is in the records."""
    if metric in METRICS:
        return METRICS[metric].better
    found = (record.custom[metric].better for record in records if record and metric in record.custom)
    return next(found, "less")
