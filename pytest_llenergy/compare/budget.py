# SPDX-License-Identifier: Apache-2.0
"""A budget: an upper limit for one metric of one test."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_llenergy.compare.metrics import METRICS, PREFIXES
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.record import Metric

#: Metrics that a budget can bound: those of which less is better, with their base unit.
UNITS = {name: kind.unit for name, kind in METRICS.items() if kind.better == "less"}


@dataclass(frozen=True)
class Budget:
    """``metric`` may be at most ``limit``, in its base unit."""

    metric: str
    limit: float
    text: str

    def judge(self, metrics: Mapping[str, Metric], *, estimated: bool = False) -> str | None:
        """Why the test fails; ``None`` within budget. A metric without a value is no pass.

        ``estimated`` says that the joules are those of a model, which the reason then says too.
        """
        metric = metrics.get(self.metric)
        if metric is None or metric.value is None:
            reason = metric.reason if metric is not None else "nothing was measured"
            return f"energy_gate: {self.metric} has no value ({reason}), so its budget cannot be checked"
        if metric.value <= self.limit:
            return None
        u = metric.uncertainty_absolute
        shown = f"{metric.value:.4g} ± {u:.2g}" if u else f"{metric.value:.4g}"
        kind = " (estimated)" if estimated else ""
        return f"energy_gate: {self.metric} is {shown} {metric.unit}{kind}, over the budget of {self.text}"


def parse_budget(metric: str | None, text: str) -> Budget:
    """Read ``"5 J"``, ``"300 mJ"``, ``"1.5 kW"``. Raises ``PlanError`` for what is none."""
    name = metric or "energy_j"
    if name not in UNITS:
        raise PlanError(f"unknown metric {name!r}; a budget can bound: {', '.join(UNITS)}")
    unit = UNITS[name]
    match = re.fullmatch(rf"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([pnumkMG]?){unit}(?:/\w+)?\s*", str(text))
    try:
        if match is None:
            raise ValueError
        limit = float(match.group(1)) * PREFIXES[match.group(2)]
        if not math.isfinite(limit):
            raise ValueError
        return Budget(name, limit, str(text))
    except ValueError:
        raise PlanError(f"budget {text!r} of {name} is no quantity in {unit}, such as '5 {unit}'") from None
