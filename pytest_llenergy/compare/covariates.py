# SPDX-License-Identifier: Apache-2.0
"""Disturbances that the code under test cannot cause: correct rounds for them, or hold a verdict back.

Other processes, other guests of the hypervisor and a warm board change the energy of a round. Where rounds
show how much, the effect is regressed out, as in an analysis of covariance (R. A. Fisher, "Statistical
Methods for Research Workers", 4th ed. (1932)). A clock rate is not used: the code can be the reason for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, sqrt
from statistics import fmean, variance

from pytest_llenergy.compare.comparability import CPU_SHARED, GPU_DOMAIN, MAJORITY
from pytest_llenergy.compare.limits import relative_spread
from pytest_llenergy.record.comparison import CORRECTED
from pytest_llenergy.record.record import Record, Round, domain_kind

#: Values of one covariate, one for each round of a sample.
Covariates = Mapping[str, Sequence[float]]

#: A slope counts from so many standard errors on, which chance reaches in less than 1 of 100 comparisons.
MIN_T = 4.0
#: Correcting must reduce the spread of the rounds at least by this factor.
SPREAD_REDUCED = 0.8
#: Fewest rounds of both sides together for a slope.
MIN_SLOPE_ROUNDS = 8

#: Standard errors by which the means of sides that were disturbed alike may differ, and the noise from which
#: the disturbance shows in rounds that alternate.
ALIKE, ALIKE_NOISE = 2.0, 0.05


def _cores_of_others(round_: Round) -> float | None:
    if round_.other_cpu_s is None or round_.duration_s <= 0:
        return None
    return (round_.other_cpu_s + (round_.stolen_cpu_s or 0.0)) / round_.duration_s


@dataclass(frozen=True)
class Disturbance:
    """A covariate of rounds: its value in one round, its name in sentences, and the unit of its slope."""

    value_of: Callable[[Round], float | None]
    name: str
    unit: str


TEMPERATURE = "temperature"

#: By the name of the flag of disturbed rounds, if there is one.
DISTURBANCES = {
    "contended": Disturbance(_cores_of_others, "CPU use of others", "core"),
    TEMPERATURE: Disturbance(
        lambda round_: round_.temperature_start_c, "temperature at the start of rounds", "K"
    ),
}

#: Causes of throttling that are not part of the workload. A board at its power cap works as configured.
HEAT = ("thermal", "power-brake")


def round_covariates(rounds: Sequence[Round]) -> dict[str, tuple[float, ...]]:
    """Return the covariates that all of the rounds have."""
    found: dict[str, tuple[float, ...]] = {}
    for name, disturbance in DISTURBANCES.items():
        values = [disturbance.value_of(each) for each in rounds]
        known = tuple(value for value in values if value is not None)
        if known and len(known) == len(values):
            found[name] = known
    return found


@dataclass(frozen=True)
class Adjustment:
    """Rounds corrected for covariates.

    Attributes:
        base: Logarithms of the baseline; ``head`` likewise.
        names: The covariates that were regressed out.
        error: Standard error of the difference between the sides that is due to those of the slopes.
        notes: What was corrected, in words.
        apart: Names of covariates that matter, but in which the sides differ too much for a correction.
    """

    base: list[float]
    head: list[float]
    names: tuple[str, ...] = ()
    error: float = 0.0
    notes: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Slope:
    name: str
    slope: float
    error: float

    @property
    def t(self) -> float:
        return abs(self.slope) / self.error if self.error else inf


def adjust_rounds(
    base: Sequence[float], head: Sequence[float], of_base: Covariates, of_head: Covariates
) -> Adjustment:
    """Regress out covariates whose slope is known well enough.

    The slope is that of least squares within the sides, so that a difference between them is not mistaken
    for an effect of the covariate.

    Args:
        base: Logarithms of the rounds of the baseline.
        head: Logarithms of the rounds of the head.
        of_base: Covariates of the baseline.
        of_head: Covariates of the head.
    """
    done = Adjustment(list(base), list(head))
    open_names = [name for name in of_base if name in of_head]
    while open_names and len(base) + len(head) >= MIN_SLOPE_ROUNDS:
        slopes = [
            _fit(name, (done.base, done.head), (of_base[name], of_head[name]), len(done.names) + 1)
            for name in open_names
        ]
        best = max((each for each in slopes if each is not None), key=lambda each: each.t, default=None)
        if best is None or best.t < MIN_T:
            break
        open_names.remove(best.name)
        done = _apply(done, best, of_base[best.name], of_head[best.name]) or done
    return done


def _fit(
    name: str,
    logs: tuple[Sequence[float], Sequence[float]],
    values: tuple[Sequence[float], Sequence[float]],
    parameters: int,
) -> _Slope | None:
    x = [value - centre for side in values for centre in [fmean(side)] for value in side]
    squares = sum(value * value for value in x)
    degrees = len(x) - 2 - parameters
    if degrees < 1 or squares <= 1e-12 * sum(value * value for side in values for value in side):
        return None
    y = [value - centre for side in logs for centre in [fmean(side)] for value in side]
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / squares
    rest = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return _Slope(name, slope, sqrt(rest / degrees / squares))


def _apply(
    done: Adjustment, slope: _Slope, of_base: Sequence[float], of_head: Sequence[float]
) -> Adjustment | None:
    """Return the rounds as they would be at the mean of the covariate; ``None`` if it does not help."""
    if slope.name == TEMPERATURE and not _have_equal_means(of_base, of_head):
        # The head itself may be the reason that its rounds start on a warmer board.
        return None
    if not _overlap(of_base, of_head):
        return replace(done, apart=(*done.apart, DISTURBANCES[slope.name].name))
    error = slope.error * abs(fmean(of_head) - fmean(of_base))
    middle = fmean([*of_base, *of_head])
    base = [log - slope.slope * (value - middle) for log, value in zip(done.base, of_base, strict=True)]
    head = [log - slope.slope * (value - middle) for log, value in zip(done.head, of_head, strict=True)]
    before = max(relative_spread(done.base), relative_spread(done.head))
    after = max(relative_spread(base), relative_spread(head))
    if after > SPREAD_REDUCED * before:
        return None
    disturbance = DISTURBANCES[slope.name]
    note = (
        f"{CORRECTED}the {disturbance.name} ({slope.slope:+.1%} per {disturbance.unit}), "
        f"which reduced the noise from {before:.1%} to {after:.1%}"
    )
    return Adjustment(
        base, head, (*done.names, slope.name), hypot(done.error, error), (*done.notes, note), done.apart
    )


def _overlap(*sides: Sequence[float]) -> bool:
    """Whether the mean of each side is within the range of the other: a slope says nothing beyond."""
    return all(min(one) <= fmean(other) <= max(one) for one, other in (sides, sides[::-1]))


def _have_equal_means(*sides: Sequence[float]) -> bool:
    error = sqrt(sum(variance(side) / len(side) for side in sides))
    return abs(fmean(sides[0]) - fmean(sides[1])) <= ALIKE * error


def find_disturbance(
    base: Record,
    head: Record,
    adjusted: Sequence[str],
    covariates: tuple[Covariates, Covariates],
    *,
    noise: float | None,
) -> str | None:
    """Return why most rounds of a side cannot support a verdict, or ``None`` if they can.

    Other processes and guests do not matter to work on GPUs alone. On the CPU, they do not matter if their
    effect was regressed out, or if rounds alternate, both sides were disturbed alike and the rounds hardly
    scatter, so that the disturbance does not matter.

    Args:
        base: The record of the baseline.
        head: The record of the head.
        adjusted: Covariates that were regressed out.
        covariates: The covariates of both sides.
        noise: Relative scatter of the rounds if those of both sides alternate, otherwise None.
    """
    calm = noise is not None and noise <= ALIKE_NOISE
    for name, cause in (("throttled", "a board was throttled by heat"), ("contended", CPU_SHARED)):
        if name in adjusted or (calm and name in DISTURBANCES and _alike(name, covariates)):
            continue
        for side, record in (("base", base), ("head", head)):
            if name in DISTURBANCES and not _uses_cpu(record):
                continue
            count = sum(_is_disturbed(round_, name) for round_ in record.rounds)
            if count > MAJORITY * len(record.rounds):
                return f"{cause} during {count} of {len(record.rounds)} rounds of {side}"
    return None


def _uses_cpu(record: Record) -> bool:
    """Whether a meter reads more than GPUs; without meters, whether the test ran on the CPU."""
    domains = {domain_kind(meter.domain) for meter in record.meters}
    return domains != {GPU_DOMAIN} if domains else record.devices == ["cpu"]


def _is_disturbed(round_: Round, name: str) -> bool:
    return any(
        flag.name == name and (name != "throttled" or any(cause in flag.detail for cause in HEAT))
        for flag in round_.flags
    )


def _alike(name: str, covariates: tuple[Covariates, Covariates]) -> bool:
    sides = [each[name] for each in covariates if len(each.get(name, ())) > 1]
    return len(sides) == 2 and _have_equal_means(*sides)
