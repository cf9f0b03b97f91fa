# SPDX-License-Identifier: Apache-2.0
"""Simulate work that repeats within a few ticks: windows in a loop, and phases of a round.

Each world is a course of power around the marks that the tool holds, and each case a result with the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from pytest_llenergy.energy.joint_solution import Segment, solve_jointly
from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Mark, Series
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable

from .watching import Spell, simulate_reader
from .waves import EPOCH, MS, S, Sensor, Wave, domain

#: Power outside the work (W).
IDLE_W = 80.0

#: Repetitions of a loop or a round.
REPEATS = 20

#: Lengths vary by this share, so that repetitions do not keep step with the counter.
VARIATION = 0.05

Steps: TypeAlias = list[tuple[int, float]]
#: The course of power in a window that begins and ends at two moments, with the rest after it.
World: TypeAlias = Callable[[Random, int, int, int], Steps]


class Result(NamedTuple):
    """An energy and the truth (J)."""

    energy: WindowEnergy
    true_j: float

    @property
    def score(self) -> float:
        """Error in units of the stated standard uncertainty."""
        return ((self.energy.energy_j or 0.0) - self.true_j) / (self.energy.u_j or 1.0)


def even(rng: Random, start_ns: int, end_ns: int, next_ns: int) -> Steps:
    """Draw constant power that steps at the marks."""
    return [(start_ns, 300.0), (end_ns, IDLE_W)]


def uneven(rng: Random, start_ns: int, end_ns: int, next_ns: int) -> Steps:
    """Draw power that differs by a tenth from window to window."""
    return [(start_ns, 300.0 * (1 + rng.gauss(0, 0.1))), (end_ns, IDLE_W)]


def late(rng: Random, start_ns: int, end_ns: int, next_ns: int) -> Steps:
    """Draw power that rises 5 ms after the mark, as when a host prepares the work of a GPU."""
    return [(start_ns + 5 * MS, 300.0), (end_ns, IDLE_W)]


def tail(rng: Random, start_ns: int, end_ns: int, next_ns: int) -> Steps:
    """Draw power that stays half as high for up to 20 ms after the window."""
    until_ns = end_ns + min(20 * MS, (next_ns - end_ns) // 2)
    return [(start_ns, 300.0), (end_ns, (300.0 + IDLE_W) / 2), (until_ns, IDLE_W)]


def burst(rng: Random, start_ns: int, end_ns: int, next_ns: int) -> Steps:
    """Draw other work right before the next window, for up to 40 ms."""
    return [(start_ns, 300.0), (end_ns, IDLE_W), (next_ns - min(40 * MS, (next_ns - end_ns) // 2), 300.0)]


WORLDS: tuple[World, ...] = (even, uneven, late, tail, burst)


def read_beside_work(
    rng: Random, wave: Wave, work: Sequence[tuple[int, int]], latch_ms: int, *, windows: bool = True
) -> Series:
    """Read a counter that ticks up to a twentieth of its period late, beside ``windows`` or rounds."""
    sensor = Sensor(wave, latch_ms * MS, rng.randrange(latch_ms * MS), latch_ms * MS // 20)
    spells = [Spell(start_ns, end_ns, at_work=True, window=windows) for start_ns, end_ns in work]
    spells.append(Spell(work[-1][1], work[-1][1] + S, at_work=False))
    first_ns, last_ns = work[0][0] - 2 * S, work[-1][1] + S
    return simulate_reader([sensor], rng, first_ns, last_ns, domain(period_s=latch_ms / 1e3), spells)


def loop(
    rng: Random,
    world: World,
    length_ms: int,
    rest_ms: int,
    latch_ms: int = 100,
    read: Callable[[Random, Wave, Sequence[tuple[int, int]], int], Series] = read_beside_work,
    repeats: int = REPEATS,
    named: Callable[[int], str] = lambda number: "step",
) -> list[Result]:
    """Return the windows of a loop, which have a name by number."""
    now_ns = EPOCH + rng.randrange(latch_ms * MS)
    windows: list[tuple[int, int]] = []
    steps: Steps = [(EPOCH - 4 * S, IDLE_W)]
    for _ in range(repeats):
        end_ns = now_ns + _vary(rng, length_ms)
        next_ns = end_ns + _vary(rng, rest_ms)
        steps += world(rng, now_ns, end_ns, next_ns)
        windows.append((now_ns, end_ns))
        now_ns = next_ns
    last_ns = windows[-1][1]
    wave = Wave(
        (*(step for step in steps if step[0] <= last_ns), (last_ns + 1, IDLE_W), (now_ns + 9 * S, 0.0))
    )
    series = read(rng, wave, windows, latch_ms)
    marks = [Mark(start, begins=True, name=named(number)) for number, (start, _) in enumerate(windows)]
    marks += [Mark(end, begins=False, name=named(number)) for number, (_, end) in enumerate(windows)]
    results = []
    for start_ns, end_ns in windows:
        energy = energy_between(series, start_ns, end_ns, marks=sorted(marks))
        energy = require_resolvable(energy, series, start_ns, end_ns)
        results.append(Result(energy, wave.joules(start_ns, end_ns)))
    return results


def phases(
    rng: Random, prefill_ms: int, decode_ms: int, latch_ms: int = 100, *, ramp: bool = False
) -> tuple[Result, Result]:
    """Return prefill at 600 W and decode at 250 W of a round.

    With ``ramp``, power rises from 360 to 840 W in prefill.
    """
    now_ns = EPOCH + rng.randrange(latch_ms * MS)
    steps: Steps = [(EPOCH - 4 * S, IDLE_W)]
    parts: list[Segment] = []
    for _ in range(REPEATS):
        border_ns = now_ns + _vary(rng, prefill_ms)
        end_ns = border_ns + _vary(rng, decode_ms)
        if ramp:
            eighth_ns = (border_ns - now_ns) // 8
            steps += [(now_ns + n * eighth_ns, 360.0 + 480 * (n + 0.5) / 8) for n in range(8)]
        else:
            steps += [(now_ns, 600.0)]
        steps += [(border_ns, 250.0)]
        parts += [Segment(now_ns, border_ns, "prefill"), Segment(border_ns, end_ns, "decode")]
        now_ns = end_ns
    wave = Wave((*steps, (now_ns, IDLE_W), (now_ns + 9 * S, 0.0)))
    start_ns = parts[0].start_ns
    series = read_beside_work(rng, wave, [(start_ns, now_ns)], latch_ms, windows=False)
    gap_ns = 4 * latch_ms * MS
    before = quiet_power(series, start_ns - gap_ns, start_ns)
    after = quiet_power(series, now_ns, now_ns + gap_ns)
    assert before is not None
    assert after is not None
    segments = [
        Segment(before.first.earliest_ns, start_ns, 0),
        *parts,
        Segment(now_ns, after.last.latest_ns, 1),
    ]
    targets = [range(1, len(parts) + 1, 2), range(2, len(parts) + 1, 2)]
    found = solve_jointly(series, segments, targets)
    truths = (
        sum(wave.joules(segments[number].start_ns, segments[number].end_ns) for number in target)
        for target in targets
    )
    prefill, decode = (Result(energy, true_j) for energy, true_j in zip(found, truths, strict=True))
    return prefill, decode


def _vary(rng: Random, length_ms: int) -> int:
    return round(length_ms * MS * (1 + rng.uniform(-VARIATION, VARIATION)))
