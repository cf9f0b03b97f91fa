# SPDX-License-Identifier: Apache-2.0
"""Energy over a time of any length, in memory that does not grow."""

from __future__ import annotations

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Variances, WindowEnergy, domain_energy
from pytest_llenergy.energy.window_arithmetic import energy_between
from pytest_llenergy.record.record import DomainEnergy

#: Ticks that came longer before an interval are forgotten (seconds).
KEPT_S = 10.0


class RunningTotal:
    """The energy of one domain, summed over intervals that follow one another.

    Two neighbouring intervals share an edge, whose error cancels in their sum. So only the edges of the first
    and the last interval count; what readings that stood still or a part-time sensor missed counts in all.

    Args:
        series: Trace of the domain, of which only the latest ticks are kept.
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        self.energy_j: float = 0.0
        self.measured_s: float = 0.0
        self.missing_s: float = 0.0
        #: Why the energy of ``missing_s`` is missing.
        self.reason: str | None = None
        self._edges: list[Variances] = []
        self._missed = Variances()

    def add(self, start_ns: int, end_ns: int) -> float | None:
        """Add an interval (monotonic nanoseconds). Returns its mean power (W), or None if it is unknown."""
        energy = energy_between(self.series, start_ns, end_ns)
        duration_s = (end_ns - start_ns) / 1e9
        self.series.forget_before(start_ns - round(KEPT_S * 1e9))
        if energy.energy_j is None:
            self.missing_s += duration_s
            self.reason = energy.reason
            return None
        self.energy_j += energy.energy_j
        self.measured_s += duration_s
        missed = Variances(outside=energy.variances.outside, coverage=energy.variances.coverage)
        self._missed += missed
        self._edges = [*self._edges[:1], energy.variances._replace(outside=0.0, coverage=0.0)]
        return energy.energy_j / duration_s

    def sum(self) -> DomainEnergy:
        """Return the energy of the intervals that have one, ``measured_s`` together."""
        if not self.measured_s:
            return domain_energy(WindowEnergy(None, reason=self.reason), self.series, 0.0)
        energy = WindowEnergy(self.energy_j, sum(self._edges, self._missed))
        return domain_energy(energy, self.series, self.measured_s)
