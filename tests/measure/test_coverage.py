# SPDX-License-Identifier: Apache-2.0
"""Is the uncertainty true? Random windows with an energy known to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.measure.energy import account
from pytest_llenergy.model.record import Round

from .waves import GAP_NS, MS, Wave, measured, moments, seen

WINDOWS = 300


@dataclass(frozen=True)
class Case:
    """A round as accounted, the truth of it and of its prefill, and the difference of two readings."""

    round: Round
    true_j: float
    true_prefill_j: float
    naive_j: float


def draw(rng: Random, latch_ns: int, *, edges_read: bool) -> Case:
    """Idle, prefill, decode, idle with random powers, lengths and phases."""
    start_ns = 10**12 + rng.randrange(latch_ns)
    end_ns = start_ns + rng.randrange(2 * latch_ns + 40 * MS, 1500 * MS)
    border_ns = rng.randrange(start_ns + latch_ns + 1, end_ns - latch_ns)
    prefill_w = rng.uniform(200, 700)
    idle_w, decode_w = rng.uniform(20, 120), rng.uniform(150, prefill_w)
    wave = Wave(
        ((0, 0.0), (10**12 - 10**9, idle_w), (start_ns, prefill_w), (border_ns, decode_w), (end_ns, idle_w))
    )
    lags = (start_ns - rng.randrange(20_000, MS), end_ns + rng.randrange(20_000, MS))
    gaps = (lags[0] - GAP_NS, lags[1] + GAP_NS)
    reads = moments(rng, gaps[0] - 60 * MS, gaps[1] + 2 * latch_ns)
    phase_ns = rng.randrange(latch_ns)
    series = seen(wave, [*reads, *lags] if edges_read else reads, latch_ns, phase_ns)
    readings = (wave.counter_j(moment, latch_ns, phase_ns) for moment in (start_ns, end_ns))
    first_j, last_j = readings
    return Case(
        round=account(measured(start_ns, end_ns, border_ns, gaps), [series]),
        true_j=wave.joules(start_ns, end_ns),
        true_prefill_j=wave.joules(start_ns, border_ns),
        naive_j=last_j - first_j,
    )


def z_scores(pairs: list[tuple[float | None, float | None, float]]) -> list[float]:
    """Errors in units of their stated uncertainty."""
    return [(energy - true) / u for energy, u, true in pairs if energy is not None and u is not None]


def covered(scores: list[float]) -> float:
    return fmean(abs(score) <= 2 for score in scores)


@pytest.mark.parametrize("edges_read", [True, False], ids=["edges-read", "edges-unread"])
@pytest.mark.parametrize("latch_ms", [10, 20, 50, 100])
def test_the_truth_lies_within_two_standard_uncertainties(latch_ms: int, edges_read: bool) -> None:
    rng = Random(latch_ms)
    cases = [draw(rng, latch_ms * MS, edges_read=edges_read) for _ in range(WINDOWS)]
    # A gap in which the reader slept through its ticks gives no number, and that is rare.
    known = [case for case in cases if case.round.energy_j is not None]
    assert len(known) >= 0.98 * WINDOWS
    scores = z_scores([(case.round.energy_j, case.round.energy_u_j, case.true_j) for case in known])
    assert covered(scores) >= 0.95
    # Nor is the uncertainty merely large: errors fill it.
    assert fmean(score**2 for score in scores) > 0.3
    assert abs(fmean(scores)) < 0.5


@pytest.mark.parametrize("latch_ms", [10, 20, 50, 100])
def test_the_truth_of_a_phase_lies_within_two_standard_uncertainties(latch_ms: int) -> None:
    rng = Random(latch_ms + 1)
    cases = [draw(rng, latch_ms * MS, edges_read=True) for _ in range(WINDOWS)]
    known = [case for case in cases if case.round.energy_j is not None]
    prefills = [(case.round.phases[0], case.true_prefill_j) for case in known]
    scores = z_scores([(phase.energy_j, phase.energy_u_j, true) for phase, true in prefills])
    assert len(scores) >= 0.9 * WINDOWS
    assert covered(scores) >= 0.95


@pytest.mark.parametrize("latch_ms", [20, 50, 100])
def test_reading_the_counter_at_both_ends_is_much_worse(latch_ms: int) -> None:
    rng = Random(latch_ms + 2)
    cases = [draw(rng, latch_ms * MS, edges_read=True) for _ in range(100)]
    known = [(case, case.round.energy_j) for case in cases if case.round.energy_j is not None]
    ours = fmean(abs(energy - case.true_j) for case, energy in known)
    naive = fmean(abs(case.naive_j - case.true_j) for case, _ in known)
    assert naive > 5 * ours
