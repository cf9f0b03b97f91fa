# SPDX-License-Identifier: Apache-2.0
"""``customSmallerIsBetter`` of github-action-benchmark."""

from __future__ import annotations

import json

from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.export.sides import Side, figures


def smaller_is_better(side: Side) -> str:
    """Every metric of which less is better. Units are those of the record, so that no value is scaled."""
    commit = side.report.source.commit
    written = []
    for record in side.measured():
        for name, metric, value in figures(record):
            if METRICS[name].better != "less":
                continue
            u = metric.uncertainty
            about = [f"{metric.n} rounds", record.kind, f"commit {commit}" if commit else None]
            entry = {"name": f"{record.id} {name}", "unit": metric.unit, "value": value}
            if u is not None:
                entry["range"] = f"± {u:.3g}"
            entry["extra"] = "\n".join(filter(None, about))
            written.append(entry)
    return json.dumps(written, indent=2) + "\n"
