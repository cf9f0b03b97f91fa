# SPDX-License-Identifier: Apache-2.0
"""What describes a metric, and values of one round that several metrics share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.record import Phase, Round, Terms
from pytest_llenergy.record.round_statistics import RoundValue

#: Shortest time that a clock measures (seconds). In a file, a round may have any duration.
CLOCK_RESOLUTION_S = 1e-9


@dataclass(frozen=True)
class RoundMetric:
    """A metric that is computed from rounds: everything that tables, gates and comparisons need of it.

    Attributes:
        unit: Unit of the metric.
        value_of: Returns the value of one round; ``None`` if it is unavailable.
        missing: Why a workload may not have the metric.
        heading: Heading of its column, with ``± u`` if its cells have the uncertainty; empty for its name.
        better: Direction that is better.
        applies: Returns whether a round has what the metric needs, apart from joules.
        phase: Phase whose energy the metric describes, if any.
        lacks: Returns what a round lacks that every valid round must have; ``None`` if it lacks nothing. A
            median over only some rounds would be another metric.
        pooled: Returns the metric of all valid rounds together and of how many values it is, if it is not the
            median over rounds.
        optional: Whether a test to which the metric does not apply leaves it out.
        source: How values are obtained that no meter reads for themselves.
        needs: What a test lacks to which the metric does not apply, if that is not what ``missing`` says.
    """

    unit: str
    value_of: Callable[[Round], RoundValue | None]
    missing: str = "no valid round"
    heading: str = ""
    better: Direction = "less"
    applies: Callable[[Round], bool] = lambda _: True
    phase: str | None = None
    lacks: Callable[[Round], str | None] | None = None
    pooled: Callable[[Sequence[Round]], tuple[float, int]] | None = None
    optional: bool = False
    needs: str = ""
    source: str | None = None

    @property
    def absent(self) -> str:
        """Why a test does not have the metric if it does not apply."""
        return self.needs or self.missing

    @property
    def is_rate(self) -> bool:
        """Whether the metric is a count over a time."""
        return self.unit.endswith("/s")


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


def joules(round_: Round, over: float) -> RoundValue | None:
    """Return a round's energy (J) divided by ``over``; ``None`` if either is missing."""
    energy_j, u_j, u_absolute_j = round_.energy_j, round_.energy_u_j, round_.energy_u_absolute_j
    if energy_j is None or u_j is None or u_absolute_j is None or not over:
        return None
    accuracy = math.sqrt(max(0.0, u_absolute_j**2 - u_j**2)) / over
    meter, unsampled, shape = _split_uncertainty(u_j, round_.terms)
    return RoundValue(energy_j / over, meter / over, unsampled / over, accuracy, round_.phase, shape / over)


def _split_uncertainty(u_j: float, terms: Terms | None) -> tuple[float, float, float]:
    """Return an uncertainty (J) in three parts: of each round, of what a sensor did not sample, and shared.

    The course of power and the offsets of clocks are the same in all rounds.
    """
    if terms is None:
        return u_j, 0.0, 0.0
    shared = math.hypot(terms.shape_j, terms.clock_j)
    return math.sqrt(max(0.0, u_j**2 - terms.coverage_j**2 - shared**2)), terms.coverage_j, shared


def rate(count: int, duration_s: float) -> RoundValue | None:
    """Return a count over a time (1/s); ``None`` if the time is too short to be measured."""
    return RoundValue(count / duration_s) if duration_s >= CLOCK_RESOLUTION_S else None


def find_phase(round_: Round, name: str) -> Phase | None:
    """Return a phase of a round by name; ``None`` if the round has no such phase."""
    return next((phase for phase in round_.phases if phase.name == name), None)


def phase_energy(name: str, round_: Round) -> RoundValue | None:
    """Return the energy of a phase for one iteration (J); ``None`` if it is unknown."""
    phase, whole = find_phase(round_, name), joules(round_, 1)
    if phase is None or phase.energy_j is None or phase.energy_u_j is None or whole is None:
        return None
    meter, unsampled, shape = _split_uncertainty(phase.energy_u_j, phase.terms)
    accuracy = whole.accuracy * phase.energy_j / whole.value if whole.value else 0.0
    value = RoundValue(phase.energy_j, meter, unsampled, accuracy, round_.phase, shape)
    return value.scale(1 / round_.iterations)
