# SPDX-License-Identifier: Apache-2.0
"""CSV in long form: a line for each metric of each test."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from pytest_llenergy.export.sides import Side
from pytest_llenergy.model.record import Record

COLUMNS = (
    "id",
    "side",
    "run_id",
    "started_at",
    "commit",
    "device_key",
    "kind",
    "status",
    "metric",
    "value",
    "unit",
    "uncertainty",
    "n",
    "reason",
)


def table(sides: Sequence[Side]) -> str:
    """All tests, also those that have no figures: their lines have an empty value, and the reason."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    for side in sides:
        for record in side.records():
            writer.writerows(_lines(side, record))
    return text.getvalue()


def _lines(side: Side, record: Record) -> Iterator[dict[str, object]]:
    run, source = side.report.run, side.report.source
    about: dict[str, object] = {
        "id": record.id,
        "side": side.name,
        "run_id": run.id,
        "started_at": run.started_at,
        "commit": source.commit or "",
        "device_key": side.device_key(record) if record.meters else "",
        "kind": record.kind or "",
        "status": record.status,
        "reason": record.reason or "",
    }
    if not record.metrics:
        yield about
    for name, metric in record.metrics.items():
        yield {
            **about,
            "metric": name,
            "value": "" if metric.value is None else repr(metric.value),
            "unit": metric.unit,
            "uncertainty": "" if metric.uncertainty is None else repr(metric.uncertainty),
            "n": metric.n,
            "reason": metric.reason or record.reason or "",
        }
