# SPDX-License-Identifier: Apache-2.0
"""Figures for one operation, made of joules that were measured and operations that were counted apart."""

from __future__ import annotations

import msgspec

from pytest_llenergy.model.flops import Flops
from pytest_llenergy.model.record import Metric


def flops_metrics(energy: Metric, flops: Flops) -> dict[str, Metric]:
    """``flops`` of an iteration, and joules for each. ``energy`` is that of an iteration (J)."""
    count = Metric(
        value=flops.count,
        unit="FLOP",
        n=int(flops.count is not None),
        reason=flops.reason,
        source=flops.source,
    )
    return {"flops": count, "energy_per_flop_j": energy_per_flop(energy, count)}


def energy_per_flop(energy: Metric, flops: Metric) -> Metric:
    """Joules for one floating-point operation; relative uncertainties are those of the energy."""
    if not flops.value:
        reason = flops.reason or "no floating-point operations were counted"
        return Metric(value=None, unit="J", reason=reason, source=flops.source)
    scaled = {
        name: None if value is None else value / flops.value
        for name in ("value", "uncertainty", "spread", "uncertainty_absolute")
        for value in (getattr(energy, name),)
    }
    return msgspec.structs.replace(energy, unit="J", source=flops.source, **scaled)
