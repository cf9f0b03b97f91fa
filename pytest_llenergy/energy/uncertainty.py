# SPDX-License-Identifier: Apache-2.0
"""Energies and powers with their uncertainty, and their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_llenergy.energy.trace import Series
    from pytest_llenergy.record.record import DomainEnergy, Terms

#: Half of Student's t for two standard deviations (p = 95.45 %) by degrees of freedom: GUM (JCGM 100:2008),
#: table G.2.
STUDENT = {1: 6.98, 2: 2.26, 3: 1.65, 4: 1.43, 5: 1.32, 6: 1.26, 7: 1.22, 8: 1.19, 9: 1.16, 10: 1.14}


class Variances(NamedTuple):
    """Variances of an energy by cause, in J².

    Adding treats the causes as independent, except ``shape``: the course of power between ticks is the same
    in all windows, iterations and boards of the same work, so that its standard uncertainties are added.
    ``clock``, from the clock of the host that reads the meters, is independent between hosts only: see
    ``sum_energies``. ``marking``, from the clock of the host that marked the edges, is the same for all
    hosts, so that its standard uncertainties are added too.
    """

    edges: float = 0.0
    outside: float = 0.0
    resolution: float = 0.0
    coverage: float = 0.0
    attribution: float = 0.0
    clock: float = 0.0
    shape: float = 0.0
    marking: float = 0.0

    # Of a tuple, ``+`` would join the two.
    def __add__(self, other: Variances) -> Variances:  # type: ignore[override]
        *independent, shape, marking = map(add, self, other)
        if self.shape and other.shape:
            shape += 2 * math.sqrt(self.shape * other.shape)
        if self.marking and other.marking:
            marking += 2 * math.sqrt(self.marking * other.marking)
        return Variances._make([*independent, shape, marking])

    def scale(self, factor: float) -> Variances:
        """Return every variance multiplied by a factor."""
        return Variances(*(factor * each for each in self))

    @property
    def total(self) -> float:
        """Sum over all causes."""
        return sum(self)

    def terms(self) -> Terms:
        """Return standard uncertainties for a record."""
        from pytest_llenergy.record.record import Terms

        named = self._replace(clock=self.clock + self.marking)._asdict()
        del named["marking"]
        return Terms(**{f"{cause}_j": math.sqrt(variance) for cause, variance in named.items()})


class Power(NamedTuple):
    """Watts and their standard uncertainty."""

    watts: float
    u_watts: float


NOTHING = Variances()


class Reading(NamedTuple):
    """The cumulative energy at one moment, and the power (W) there if power beside it is known."""

    energy_j: float
    variances: Variances
    watts: float | None = None


class WindowEnergy(NamedTuple):
    """Joules of a window with their variances, or ``None`` with a reason."""

    energy_j: float | None
    variances: Variances = NOTHING
    reason: str | None = None

    @property
    def u_j(self) -> float | None:
        """Combined standard uncertainty (J)."""
        return None if self.energy_j is None else math.sqrt(self.variances.total)

    def widen(self, variances: Variances) -> WindowEnergy:
        """Return the same energy with more variances; without energy, the reason alone."""
        return self if self.energy_j is None else self._replace(variances=self.variances + variances)


class Attributed(NamedTuple):
    """The test's part of the energy of a domain, with the limits of the split; ``whole_j`` is all of it."""

    energy: WindowEnergy
    whole_j: float
    low_j: float
    high_j: float


def sum_energies(
    energies: Sequence[WindowEnergy], reasons: Sequence[str] = (), *, one_clock: bool = True
) -> WindowEnergy:
    """Return the sum over domains or, without ``one_clock``, hosts. One without energy leaves its reason.

    One clock gives the moments of all domains of a host, so that its standard uncertainties are added.
    """
    if not energies:
        return WindowEnergy(None, reason="; ".join(reasons) or "no meter was open")
    total = WindowEnergy(0.0)
    for energy in energies:
        if energy.energy_j is None or total.energy_j is None:
            return WindowEnergy(None, reason=energy.reason)
        total = WindowEnergy(total.energy_j + energy.energy_j, total.variances + energy.variances)
    if not one_clock:
        return total
    clock = sum(math.sqrt(energy.variances.clock) for energy in energies) ** 2
    return total._replace(variances=total.variances._replace(clock=clock))


def domain_energy(
    energy: WindowEnergy, series: Series, duration_s: float, attributed: Attributed | None = None
) -> DomainEnergy:
    """Return the energy of a domain for a record, with the limits of its source."""
    from pytest_llenergy.record.record import DomainEnergy

    domain = series.domain
    low_j = high_j = None
    if energy.energy_j is not None:
        low_j, high_j = domain.limits(energy.energy_j, duration_s)
    if attributed is not None:
        low_j = domain.limits(attributed.low_j, duration_s)[0]
        high_j = domain.limits(attributed.high_j, duration_s)[1]
    return DomainEnergy(
        energy_j=energy.energy_j,
        energy_u_j=energy.u_j,
        kind="attributed" if attributed is not None else domain.kind,
        terms=energy.variances.terms() if energy.energy_j is not None else None,
        reason=energy.reason,
        low_j=low_j,
        high_j=high_j,
        whole_j=attributed.whole_j if attributed is not None else None,
    )


def absolute_uncertainty_j(total: WindowEnergy, domains: Sequence[DomainEnergy]) -> float | None:
    """Return the standard uncertainty (J) that includes the accuracy of the sources.

    The accuracy is a rectangular distribution. Sensors of one kind err in the same direction, so the limits
    of domains are added linearly.
    """
    if total.energy_j is None:
        return None
    return math.sqrt(total.variances.total + sum(each.width_j for each in domains) ** 2 / 12)


def student_factor(degrees: float) -> float:
    """Return the factor that widens a standard uncertainty from few values: 1 + 5/(4ν) beyond the table."""
    return STUDENT.get(int(degrees), 1 + 1.25 / degrees) if degrees >= 1 else STUDENT[1]
