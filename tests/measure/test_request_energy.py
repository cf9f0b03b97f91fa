# SPDX-License-Identifier: Apache-2.0
"""Energies of requests, against a board whose power follows the number of active requests."""

from __future__ import annotations

import math
from random import Random
from statistics import median

import pytest

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.measure.request_energy import (
    RequestShares,
    RequestSpan,
    request_energies,
    request_spans,
    share_among_requests,
)
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.timeline import Iteration, RequestTimeline

from ..energy.waves import EPOCH, S, Sensor, Wave, domain, read_at
from .marks import measured_round
from .request_loads import COURSES, Course, draw, linear, load, poisson


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize(("latch_ms", "noise", "sharing"), [(20, 0.2, "equal"), (100, 0.1, "tokens")])
def test_requests_add_up_and_are_within_their_uncertainties(
    course: Course, latch_ms: int, noise: float, sharing: Sharing
) -> None:
    rng, scores = Random(f"{course.__name__} {latch_ms}"), list[float]()
    for _ in range(4):
        found = draw(rng, course, latch_ms, noise, sharing)
        assert math.fsum(found.energies.energy_j) == pytest.approx(found.round_.energy_j, rel=1e-12)
        scores += found.scores
    assert sum(score <= 2 for score in scores) >= 0.95 * len(scores)
    assert median(scores) > 0.2


def test_quantiles_are_metrics_and_each_request_is_listed_on_demand_only() -> None:
    found = load(Random(1), linear, poisson(Random(1), 5.0, 21, 300.0))
    energies, metrics = found.energies, compute_metrics([found.round_], None)
    values = [metrics[f"energy_per_request_p{percent}_j"].value for percent in (50, 90, 99)]
    ordered = sorted(energies.energy_j)
    assert values == pytest.approx([ordered[10], ordered[18], 0.2 * ordered[19] + 0.8 * ordered[20]])
    assert metrics["energy_per_request_p50_j"].unit == "J/request"
    assert request_energies(RequestShares([1.0], [0.1]), "equal", each=False).energy_j == []


def shared(spans: list[tuple[float, float, float]], watts: list[tuple[float, float]]) -> list[float]:
    """Return the energies of requests with spans and weights, of a counter that moves every millisecond."""
    steps = [(EPOCH - S, 5.0), *((EPOCH + round(at_s * S), each_w) for at_s, each_w in watts)]
    wave = Wave((*steps, (EPOCH + 99 * S, 0.0)))
    moments = range(EPOCH - S // 100, EPOCH + 4 * S + S // 100, S // 1000)
    series = read_at(Sensor(wave, 0), moments, domain(period_s=0.001))
    found = [
        RequestSpan(EPOCH + round(begin_s * S), EPOCH + round(begin_s * S), EPOCH + round(end_s * S), weight)
        for begin_s, end_s, weight in spans
    ]
    whole = WindowEnergy(wave.joules(EPOCH, EPOCH + 4 * S))
    return share_among_requests(series, found, EPOCH, EPOCH + 4 * S, whole, 0.0).energy_j


def test_shares_by_hand() -> None:
    """100 W for 4 s. Alone from 0 to 1, together to 2, nobody from 2 to 3, alone to 4."""
    steady = [(0.0, 100.0), (4.0, 5.0)]
    equal = shared([(0, 2, 1), (1, 2, 1), (3, 4, 1)], steady)
    assert equal == pytest.approx([150 + 100 / 3, 50 + 100 / 3, 100 + 100 / 3], rel=1e-3)
    weighted = shared([(0, 2, 3), (1, 2, 1), (3, 4, 1)], steady)
    assert weighted == pytest.approx([175 + 60, 25 + 20, 100 + 20], rel=1e-3)


def test_a_request_without_an_end_leaves_no_energies() -> None:
    known = RequestTimeline(input_tokens=1, output_tokens=1, last_token_ns=EPOCH + S)
    unknown = RequestTimeline(input_tokens=1, output_tokens=1)
    for requests, count in (((known,), 1), ((known, unknown), 0)):
        work = Iteration(start_ns=EPOCH, end_ns=EPOCH + S, requests=requests)
        assert len(request_spans(measured_round(work).timeline, "equal")) == count


def test_power_averaged_over_longer_than_requests_is_a_reason() -> None:
    series = Series("nvml", domain(smear_s=1.0))
    span = RequestSpan(EPOCH, EPOCH, EPOCH + S, 1.0)
    found = share_among_requests(series, [span], EPOCH, EPOCH + S, WindowEnergy(1.0), 0.0)
    assert found.energy_j == []
    assert "averaged over 1 s" in (found.reason or "")
