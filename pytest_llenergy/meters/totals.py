# SPDX-License-Identifier: Apache-2.0
"""From the domains of a window to its sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llenergy.meters.quantities import Energy
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.record import DomainEnergy


def add(energies: Sequence[Energy], reasons: Sequence[str] = ()) -> Energy:
    """The sum over domains, or none with the reason of the first that is missing."""
    if not energies:
        return Energy(None, reason="; ".join(reasons) or "no meter was open")
    total = Energy(0.0)
    for energy in energies:
        if energy.energy_j is None or total.energy_j is None:
            return Energy(None, reason=energy.reason)
        total = Energy(total.energy_j + energy.energy_j, total.variances + energy.variances)
    return total


def stored(energy: Energy, series: Series, duration_s: float) -> DomainEnergy:
    """The energy of a domain as it goes into a record, with the limits of its source."""
    domain = series.domain
    low_j = high_j = None
    if energy.energy_j is not None:
        low_j, high_j = domain.limits(energy.energy_j, duration_s)
    return DomainEnergy(
        energy_j=energy.energy_j,
        energy_u_j=energy.u_j,
        kind=domain.kind,
        terms=energy.variances.terms() if energy.energy_j is not None else None,
        reason=energy.reason,
        low_j=low_j,
        high_j=high_j,
    )


def absolute_u_j(total: Energy, domains: Sequence[DomainEnergy]) -> float | None:
    """The standard uncertainty with the limits of the sources, rectangular, taken in.

    What is wrong with one sensor is wrong with the next of its kind, in the same direction: the limits of
    domains are added as they are.
    """
    if total.energy_j is None:
        return None
    widths = [(each.high_j or 0.0) - (each.low_j or 0.0) for each in domains]
    return math.sqrt(total.variances.total + sum(widths) ** 2 / 12)
