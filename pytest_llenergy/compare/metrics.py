# SPDX-License-Identifier: Apache-2.0
"""The metrics that can be gated: their units, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.metrics import BUILT_IN, ROUND_METRICS
from pytest_llenergy.record.record import Record

#: Factors of unit prefixes. Metrics are stored in base units.
UNIT_PREFIXES = {"": 1.0, "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class MetricKind:
    """Base unit, as users write it after a number, and the direction that is better."""

    unit: str
    better: Direction = "less"


#: Every built-in metric of a record that a gate can use.
METRICS = {
    # The name of the metric says per what.
    name: MetricKind("J" if figure.unit.startswith("J/") else figure.unit, figure.better)
    for name, figure in BUILT_IN.items()
}


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
