# SPDX-License-Identifier: Apache-2.0
"""The energy of a phase that is too short has a reason, which says how many iterations show it."""

from __future__ import annotations

import re
from random import Random

import pytest

from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Metric

from ..energy.waves import EPOCH, MS, S, Sensor, Wave, domain, read_at
from .marks import account_here, iteration, measured_round

TICK_NS, GAP_NS = 100 * MS, 400 * MS


def prefill_metric(rng: Random, rounds: int, iterations: int, prefill_ms: int, decode_ms: int) -> Metric:
    """Return the energy of prefill at 600 W before decode at 250 W, whose lengths vary by 3 %."""
    found = []
    for _ in range(rounds):
        start_ns = now_ns = EPOCH + 5 * S + rng.randrange(TICK_NS)
        steps, parts = [(EPOCH, 80.0)], []
        for _ in range(iterations):
            border_ns = now_ns + round(prefill_ms * MS * rng.uniform(0.97, 1.03))
            end_ns = border_ns + round(decode_ms * MS * rng.uniform(0.97, 1.03))
            steps += [(now_ns, 600.0), (border_ns, 250.0)]
            parts.append(iteration(now_ns, end_ns, border_ns))
            now_ns = end_ns
        wave = Wave((*steps, (now_ns, 80.0)))
        reads = range(start_ns - 2 * GAP_NS, now_ns + 2 * GAP_NS, MS)
        series = read_at(Sensor(wave, TICK_NS), reads, domain(period_s=0.1, highest_w=700.0))
        measured = measured_round(*parts, gaps=(start_ns - GAP_NS, now_ns + GAP_NS))
        found.append(account_here(measured, [series]))
    return compute_metrics(found, None)["prefill_energy_j"]


@pytest.mark.parametrize(("rounds", "prefill_ms", "decode_ms"), [(4, 20, 150), (6, 15, 15), (6, 8, 60)])
def test_the_iterations_of_the_reason_show_the_phase(rounds: int, prefill_ms: int, decode_ms: int) -> None:
    rng, advised = Random(5), 0
    for _ in range(5):
        short = prefill_metric(rng, rounds, 1, prefill_ms, decode_ms)
        if short.value is None:
            said = re.search(r"energy_options\(iterations=(\d+)\) would do", str(short.reason))
            assert said is not None, short.reason
            metric = prefill_metric(rng, rounds, min(int(said[1]), 100), prefill_ms, decode_ms)
            assert metric.value is not None, metric.reason
            assert metric.uncertainty is not None
            assert abs(metric.value - 0.6 * prefill_ms) <= 2 * metric.uncertainty
            advised += 1
    assert advised


def test_no_number_of_iterations_shows_a_phase_far_below_a_tick() -> None:
    metric = prefill_metric(Random(5), 4, 1, 4, 100)
    assert metric.value is None
    assert "no number of iterations shows phases below 5 ms" in str(metric.reason)
