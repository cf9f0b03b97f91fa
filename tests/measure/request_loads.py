# SPDX-License-Identifier: Apache-2.0
"""Served loads on a board whose power follows the number of active requests, with the true energy of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

from pytest_llenergy.energy.trace import Series
from pytest_llenergy.measure.accounting import account_round
from pytest_llenergy.measure.domain_rounds import account_domains
from pytest_llenergy.measure.request_energy import request_spans
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.served import RequestEnergies
from pytest_llenergy.record.timeline import Iteration, RequestTimeline, Span

from ..energy.watching import Spell, simulate_reader
from ..energy.waves import EPOCH, MS, S, Sensor, Wave, domain
from .marks import measured_round

IDLE_W = 80.0

#: Returns the power (W) of a board with so many active requests, of which some wait for their first token.
Course = Callable[[int, int], float]


def linear(active: int, waiting: int) -> float:
    return IDLE_W + 40.0 * active


def concave(active: int, waiting: int) -> float:
    return IDLE_W + 150.0 * math.sqrt(active)


def saturating(active: int, waiting: int) -> float:
    return IDLE_W + 60.0 * min(active, 4)


def prefilling(active: int, waiting: int) -> float:
    return IDLE_W + (300.0 if waiting else 150.0 if active else 0.0)


COURSES = (linear, concave, saturating, prefilling)


class Load(NamedTuple):
    """A round of a served load, with the true energy of each request (J)."""

    round_: Round
    true_j: list[float]
    energies: RequestEnergies

    @property
    def scores(self) -> list[float]:
        """Error of each request in units of its standard uncertainty."""
        found = zip(self.energies.energy_j, self.true_j, self.energies.energy_u_j, strict=True)
        return [abs(each_j - true_j) / u_j for each_j, true_j, u_j in found]


def draw(rng: Random, course: Course, latch_ms: int, noise: float, sharing: Sharing = "equal") -> Load:
    """Measure 40 requests at 1 to 20 a second that take 55 ms to 1.1 s each, and some much longer."""
    rate, mean_ms = math.exp(rng.uniform(0, 3)), math.exp(rng.uniform(4, 7))
    return load(rng, course, poisson(rng, rate, 40, mean_ms), latch_ms, noise, sharing)


def poisson(rng: Random, rate: float, count: int, mean_ms: float) -> list[RequestTimeline]:
    """Return requests with Poisson arrivals and lognormal lengths."""
    start_ns, requests = EPOCH + rng.randrange(100 * MS), []
    for _ in range(count):
        length_ns = round(mean_ms * MS * math.exp(rng.gauss(0, 0.5)))
        first_ns = start_ns + round(length_ns * rng.uniform(0.05, 0.3))
        requests.append(
            RequestTimeline(
                input_tokens=rng.randrange(5, 500),
                output_tokens=rng.randrange(1, 200),
                start_ns=start_ns,
                first_token_ns=first_ns,
                last_token_ns=start_ns + length_ns,
            )
        )
        start_ns += round(rng.expovariate(rate) * S)
    return requests


def load(
    rng: Random,
    course: Course,
    requests: list[RequestTimeline],
    latch_ms: int = 100,
    noise: float = 0.0,
    sharing: Sharing = "equal",
) -> Load:
    """Measure requests on a board whose power follows them, with noise of this share every 3 to 30 ms."""
    start_ns = min(each.start_ns or 0 for each in requests)
    end_ns = max(each.last_token_ns or 0 for each in requests) + 2 * MS
    spans = [
        (each.start_ns or 0, each.first_token_ns or 0, each.last_token_ns or 0, _weight(each, sharing))
        for each in requests
    ]
    grain_ns = rng.randrange(3 * MS, 30 * MS)
    moments = {start_ns, end_ns, *(moment for span in spans for moment in span[:3])}
    moments |= set(range(start_ns, end_ns, grain_ns))
    steps, factors = [(EPOCH - 4 * S, IDLE_W)], {0: 1.0}
    true_j, everyone = [0.0] * len(spans), sum(span[3] for span in spans)
    for left_ns, right_ns in pairwise(sorted(moments)):
        active = [number for number, span in enumerate(spans) if span[0] <= left_ns < span[2]]
        waiting = sum(left_ns < spans[number][1] for number in active)
        factor = factors.setdefault((left_ns - start_ns) // grain_ns + 1, max(0.1, rng.gauss(1, noise)))
        watts = course(len(active), waiting) * factor
        steps.append((left_ns, watts))
        sharers = active or range(len(spans))
        total = sum(spans[number][3] for number in sharers) if active else everyone
        for number in sharers:
            true_j[number] += watts * (right_ns - left_ns) / S * spans[number][3] / total
    wave = Wave((*steps, (end_ns, IDLE_W), (end_ns + 9 * S, 0.0)))
    series = _read(rng, wave, start_ns, end_ns, latch_ms)
    span = Span(name="steady", start_ns=start_ns, end_ns=end_ns)
    work = Iteration(start_ns=start_ns, end_ns=end_ns, requests=tuple(requests), spans=(span,))
    measured = measured_round(work, gaps=(start_ns - S, end_ns + S))
    measured = replace(measured, requests=request_spans(measured.timeline, sharing))
    round_ = account_round(measured, [account_domains(measured, [series])], sharing)
    assert round_.request_energies is not None
    return Load(round_, true_j, round_.request_energies)


def _weight(request: RequestTimeline, sharing: Sharing) -> float:
    return 1.0 if sharing == "equal" else float(request.input_tokens + request.output_tokens)


def _read(rng: Random, wave: Wave, start_ns: int, end_ns: int, latch_ms: int) -> Series:
    sensor = Sensor(wave, latch_ms * MS, rng.randrange(latch_ms * MS), latch_ms * MS // 20)
    spells = [Spell(start_ns, end_ns, at_work=True), Spell(end_ns, end_ns + S, at_work=False)]
    return simulate_reader(
        [sensor], rng, start_ns - 2 * S, end_ns + S, domain(period_s=latch_ms / 1e3), spells
    )
