# SPDX-License-Identifier: Apache-2.0
"""Simulate random windows over random waves and sensors, each with its true energy."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import fmean, median

from pytest_llenergy.energy.power_readings import refresh_with_period
from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable

from .watching import Spell, simulate_reader
from .waves import EPOCH, MS, SHAPES, S, Sensor, Wave, domain

#: The power limit that the meter reports; no wave exceeds 700 W.
HIGHEST_W = 750.0


@dataclass(frozen=True)
class Kind:
    """The conditions under which windows are simulated.

    Attributes:
        part_time: The sensor sees only a part of each tick.
        quiet: Quiet gaps surround the window, as in a round; otherwise load, as for a window of ``measure``.
        boards: Boards that the one reader polls.
        integrated: Power readings are integrated; otherwise a counter is read.
        same_process: The load is a loop in the reader's own process, which holds the interpreter's lock.
    """

    part_time: bool
    quiet: bool
    boards: int = 1
    integrated: bool = False
    same_process: bool = False

    def __str__(self) -> str:
        sensor = (
            "power integrated" if self.integrated else f"{'part-time' if self.part_time else 'full'} sensor"
        )
        boards = f"{self.boards} board{'s' * (self.boards > 1)}"
        where = ", same process" if self.same_process else ""
        return f"{sensor}, {'quiet gaps' if self.quiet else 'load all around'}, {boards}{where}"


KINDS = [
    Kind(part_time, quiet, boards)
    for boards in (1, 8)
    for part_time in (False, True)
    for quiet in (True, False)
]
KINDS += [Kind(part_time=False, quiet=quiet, integrated=True) for quiet in (True, False)]
KINDS += [
    Kind(part_time, quiet, boards=8, same_process=True)
    for part_time in (False, True)
    for quiet in (True, False)
]


@dataclass(frozen=True)
class Case:
    """One window: its length, the counter's period, the result, the truth, and the naive difference."""

    kind: Kind
    shape: str
    duration_s: float
    period_s: float
    energy: WindowEnergy
    true_j: float
    naive_j: float

    @property
    def score(self) -> float:
        """Error in units of the stated standard uncertainty."""
        assert self.energy.energy_j is not None
        assert self.energy.u_j is not None
        return abs(self.energy.energy_j - self.true_j) / self.energy.u_j


def draw(rng: Random, kind: Kind) -> Case:
    """Simulate a window of 10 ms to 10 s (log-uniform) and a counter that ticks every 10 to 110 ms.

    Half of the counters tick late by up to an eighth of their period; half have a known period. The reader
    starts one to four seconds before the window, or at least a quarter of a second if the load runs in its
    process.
    """
    latch_ns = rng.randrange(10 * MS, 110 * MS)
    jitter_ns = rng.randrange(1, latch_ns // 8) if rng.random() < 0.5 and not kind.integrated else 0
    window_ns = round(latch_ns * rng.uniform(0.2, 0.8)) if kind.part_time else 0
    start_ns = EPOCH + rng.randrange(latch_ns)
    end_ns = start_ns + round(10 ** rng.uniform(7, 10))
    shape = rng.choice(SHAPES)
    margin = (0, 0) if kind.quiet else (rng.randrange(200 * MS, S), rng.randrange(200 * MS, S))
    load = (start_ns - margin[0], end_ns + margin[1])
    idle_w = rng.uniform(20, 120)
    wave = Wave(((EPOCH - 8 * S, idle_w), *shape(rng, *load), (load[1], idle_w)))
    sensors = [
        Sensor(wave, latch_ns, rng.randrange(latch_ns), jitter_ns, window_ns) for _ in range(kind.boards)
    ]
    known = latch_ns / S if kind.integrated or rng.random() < 0.5 else None
    coverage = window_ns / latch_ns if kind.part_time else 1.0
    meter_domain = domain(period_s=known, coverage=coverage, highest_w=HIGHEST_W)
    if kind.integrated:
        meter_domain = meter_domain._replace(
            integrated=True, late_s=refresh_with_period(latch_ns / S, share=1.0).late_s
        )
    # The reader notices the window's ends a little late: it is not the process that does the work.
    begins_ns, ends_ns = start_ns - rng.randrange(20_000, MS), end_ns + rng.randrange(20_000, MS)
    gap_ns = max(250 * MS, round(3.5 * latch_ns))
    until_ns = ends_ns + gap_ns + 3 * latch_ns
    spells = [
        Spell(begins_ns, ends_ns, at_work=True, window=not kind.quiet),
        Spell(ends_ns, until_ns, at_work=False),
    ]
    if kind.quiet:
        spells.insert(0, Spell(begins_ns - gap_ns, begins_ns, at_work=False))
    # A script may open its window as soon as the first ticks have come.
    before_ns = begins_ns - gap_ns - rng.randrange(S // 4 if kind.same_process else S, 4 * S)
    holding_ns = load if kind.same_process else (0, 0)
    series = simulate_reader(sensors, rng, before_ns, until_ns, meter_domain, spells, holding_ns)
    before = after = None
    if kind.quiet:
        before = quiet_power(series, begins_ns - gap_ns, start_ns)
        after = quiet_power(series, end_ns, ends_ns + gap_ns)
    duration_s = (end_ns - start_ns) / S
    energy = require_resolvable(
        energy_between(series, start_ns, end_ns, before, after), series, start_ns, end_ns
    )
    naive_j = sensors[0].counter_j(end_ns) - sensors[0].counter_j(start_ns)
    true_j = wave.joules(start_ns, end_ns)
    return Case(kind, shape.__name__, duration_s, latch_ns / S, energy, true_j, naive_j)


@dataclass(frozen=True)
class Summary:
    """Statistics of the resolved windows: their number, coverage of 2u, fullness of u, and errors."""

    windows: int
    resolved: int
    covered: float
    fullness: float
    error: float
    naive_error: float


def summarise(cases: list[Case]) -> Summary:
    """Summarise cases; ``fullness`` is the median of |E - truth|/u, errors are relative medians."""
    known = [case for case in cases if case.energy.energy_j is not None]
    return Summary(
        windows=len(cases),
        resolved=len(known),
        covered=fmean(case.score <= 2 for case in known),
        fullness=median(case.score for case in known),
        error=median(abs((case.energy.energy_j or 0.0) - case.true_j) / case.true_j for case in known),
        naive_error=median(abs(case.naive_j - case.true_j) / case.true_j for case in known),
    )
