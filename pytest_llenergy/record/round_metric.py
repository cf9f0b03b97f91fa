# SPDX-License-Identifier: Apache-2.0
"""What describes a metric, and values of one round that several metrics share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.record import Phase, Round, Terms
from pytest_llenergy.record.round_statistics import RoundValue

#: Shortest time that a clock measures (seconds). In a file, a round may have any duration.
CLOCK_RESOLUTION_S = 1e-9

#: Why a round has no energy of a part, and no rate.
NO_ENERGY, NO_TIME = "the round has no energy", "the round took no time"


@dataclass(frozen=True)
class RoundMetric:
    """A metric that is computed from rounds: everything that tables, gates and comparisons need of it.

    Attributes:
        unit: Unit of the metric.
        of: Returns the value of one round, or why it has none: ``needs`` if the metric does not apply to it.
        needs: What work lacks to which the metric does not apply.
        heading: Heading of its column, with ``± u`` if its cells have the uncertainty; empty for its name.
        better: Direction that is better.
        phase: Phase whose energy the metric describes, if any.
        every: Whether the test has a value only if every valid round has one. A median over only some rounds
            would be another metric.
        pooled: Returns the metric of all valid rounds together and of how many values it is, if it is not the
            median over rounds.
        optional: Whether a test to which the metric does not apply leaves it out.
        source: How values are obtained that no meter reads for themselves.
    """

    unit: str
    of: Callable[[Round], RoundValue | str]
    needs: str = "no valid round"
    heading: str = ""
    better: Direction = "less"
    phase: str | None = None
    every: bool = False
    pooled: Callable[[Sequence[Round]], tuple[float, int]] | None = None
    optional: bool = False
    source: str | None = None

    def applies(self, rounds: Iterable[Round]) -> bool:
        """Return whether work has what the metric needs, such as tokens, apart from the meters."""
        return any(self.of(each) != self.needs for each in rounds)


@dataclass(frozen=True)
class SingleMetric:
    """A metric that has one value for all rounds of a test: its unit, heading, and the better direction."""

    unit: str
    heading: str
    better: Direction = "less"


def is_energy_unit(unit: str) -> bool:
    """Return whether a metric with a unit is computed from joules."""
    return "J" in unit or unit == "W"


def is_valid(round_: Round) -> bool:
    """Return whether a round counts in metrics."""
    return not any(flag.severity == "invalid" for flag in round_.flags)


def joules(round_: Round, over: float = 1) -> RoundValue | str:
    """Return a round's energy (J) divided by ``over``, or why it has none."""
    energy_j, u_j, u_absolute_j = round_.energy_j, round_.energy_u_j, round_.energy_u_absolute_j
    if energy_j is None or u_j is None or u_absolute_j is None:
        return round_.reason or NO_ENERGY
    accuracy = math.sqrt(max(0.0, u_absolute_j**2 - u_j**2)) / over
    meter, unsampled, shape = _split_uncertainty(u_j, round_.terms)
    return RoundValue(energy_j / over, meter / over, unsampled / over, accuracy, round_.phase, shape / over)


def part_of_energy(round_: Round, energy_j: float, meter: float, *rest: float) -> RoundValue | str:
    """Return a part of a round's energy (J), which has the relative accuracy of the whole, or why not.

    ``rest`` are its uncertainties ``unsampled`` and ``shape``, if any.
    """
    whole = joules(round_)
    if isinstance(whole, str):
        return whole
    unsampled, shape = rest or (0.0, 0.0)
    accuracy = whole.accuracy * energy_j / whole.value if whole.value else 0.0
    return RoundValue(energy_j, meter, unsampled, accuracy, round_.phase, shape)


def _split_uncertainty(u_j: float, terms: Terms | None) -> tuple[float, float, float]:
    """Return an uncertainty (J) in three parts: of each round, of what a sensor did not sample, and shared.

    The course of power and the offsets of clocks are the same in all rounds.
    """
    if terms is None:
        return u_j, 0.0, 0.0
    shared = math.hypot(terms.shape_j, terms.clock_j)
    return math.sqrt(max(0.0, u_j**2 - terms.coverage_j**2 - shared**2)), terms.coverage_j, shared


def rate(count: int, duration_s: float) -> RoundValue | str:
    """Return a count over a time (1/s)."""
    return RoundValue(count / duration_s) if duration_s >= CLOCK_RESOLUTION_S else NO_TIME


def find_phase(round_: Round, name: str) -> Phase | None:
    """Return a phase of a round by name; ``None`` if the round has no such phase."""
    return next((phase for phase in round_.phases if phase.name == name), None)


def phase_energy(round_: Round, phase: Phase) -> RoundValue | str:
    """Return the energy of a phase for one iteration (J), or why it is unknown."""
    if phase.energy_j is None or phase.energy_u_j is None:
        return phase.reason or NO_ENERGY
    parts = _split_uncertainty(phase.energy_u_j, phase.terms)
    energy = part_of_energy(round_, phase.energy_j, *parts)
    return energy if isinstance(energy, str) else energy.scale(1 / round_.iterations)
