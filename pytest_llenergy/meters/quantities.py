# SPDX-License-Identifier: Apache-2.0
"""Energies and powers with what is not known of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_llenergy.model.record import Terms


@dataclass(frozen=True)
class Variances:
    """What is not known of an energy, by cause, in J²."""

    edges: float = 0.0
    outside: float = 0.0
    resolution: float = 0.0
    coverage: float = 0.0

    def __add__(self, other: Variances) -> Variances:
        return Variances(
            self.edges + other.edges,
            self.outside + other.outside,
            self.resolution + other.resolution,
            self.coverage + other.coverage,
        )

    @property
    def total(self) -> float:
        """All causes together."""
        return self.edges + self.outside + self.resolution + self.coverage

    def terms(self) -> Terms:
        """As standard uncertainties, for a record."""
        return Terms(
            edges_j=math.sqrt(self.edges),
            outside_j=math.sqrt(self.outside),
            resolution_j=math.sqrt(self.resolution),
            coverage_j=math.sqrt(self.coverage),
        )


@dataclass(frozen=True)
class Power:
    """Watts and their standard uncertainty."""

    watts: float
    u_watts: float


NOTHING = Variances()


@dataclass(frozen=True)
class Reading:
    """The cumulative energy at one moment."""

    energy_j: float
    variances: Variances


@dataclass(frozen=True)
class Energy:
    """Joules of a window and what is in doubt of them, or the reason why there are none."""

    energy_j: float | None
    variances: Variances = NOTHING
    reason: str | None = None

    @property
    def u_j(self) -> float | None:
        """The combined standard uncertainty (J)."""
        return None if self.energy_j is None else math.sqrt(self.variances.total)
