# SPDX-License-Identifier: Apache-2.0
"""Known power waveforms, the latched counter of one, and what a reader sees of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.meters.protocol import Domain, within
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.timeline import RankTimeline, RoundTimeline

MS = 1_000_000
POLL_NS = 10 * MS
GAP_NS = 250 * MS


@dataclass(frozen=True)
class Wave:
    """Watts from each moment (nanoseconds) to the next; nothing before the first."""

    steps: tuple[tuple[int, float], ...]

    def joules(self, start_ns: int, end_ns: int) -> float:
        """The true energy between two moments."""
        borders = [*self.steps, (end_ns, 0.0)]
        total = 0.0
        for (begin, watts), (finish, _) in pairwise(borders):
            total += watts * max(0, min(finish, end_ns) - max(begin, start_ns)) / 1e9
        return total

    def counter_j(self, time_ns: int, latch_ns: int, phase_ns: int = 0) -> float:
        """What a counter in millijoules says that looks at the truth every ``latch_ns``."""
        latched_ns = (time_ns - phase_ns) // latch_ns * latch_ns + phase_ns
        return int(self.joules(0, latched_ns) * 1000) / 1000


def domain(name: str = "gpu:GPU-a", period_s: float | None = None) -> Domain:
    return Domain(
        name=name,
        kind="measured",
        source="wave",
        scope="board",
        update_period_s=period_s,
        resolution_j=0.001,
        accuracy="within 5%",
        limits=within(0.05),
    )


def seen(wave: Wave, moments: Iterable[int], latch_ns: int, phase_ns: int = 0) -> Series:
    """The series of a reader that looked at these moments."""
    series = Series("nvml", domain())
    for moment in sorted(moments):
        series.add(moment, wave.counter_j(moment, latch_ns, phase_ns))
    return series


def moments(rng: Random, start_ns: int, end_ns: int) -> list[int]:
    """When a thread reads that sleeps 10 ms, and is now and then not scheduled for longer."""
    found: list[int] = []
    now = start_ns + rng.randrange(POLL_NS)
    while now < end_ns:
        found.append(now)
        now += POLL_NS + rng.randrange(MS) + (rng.randrange(40 * MS) if rng.random() < 0.03 else 0)
    return found


def measured(
    start_ns: int, end_ns: int, border_ns: int | None = None, gaps: Sequence[int] | None = None
) -> MeasuredRound:
    """A round with a quarter of a second of quiet at either side, or up to the two moments in ``gaps``."""
    rank = RankTimeline(rank=0, start_ns=start_ns, end_ns=end_ns, cpu_time_s=0.0, first_token_ns=border_ns)
    before, after = gaps or (start_ns - GAP_NS, end_ns + GAP_NS)
    return MeasuredRound(
        timeline=RoundTimeline(ranks=(rank,)),
        gap_start_ns=before,
        gap_end_ns=after,
        other_cpu_s=0.0,
        stolen_cpu_s=0.0,
        temperature_start_c=None,
    )
