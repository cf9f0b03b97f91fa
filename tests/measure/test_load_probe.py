# SPDX-License-Identifier: Apache-2.0
"""How long loads are and what their rounds show, on queues whose maximum a calculation gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from statistics import median

import pytest

from pytest_llenergy.backends.load_phases import load_phases
from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.loads import (
    MAX_PROBE_ROUNDS,
    LoadSearch,
    allowed_misses,
    arrivals_uncertainty,
    check_loads,
    is_decided,
    is_within,
    probe_requests,
    probe_rounds,
    steady_requests,
)
from pytest_llenergy.record.load_curve import Slo, slo
from pytest_llenergy.record.record import Flag, Round

from ..backends.queues import arrivals_s, queued
from ..record.test_goodput import load

TOLERANCE = 0.05


def waits_s(slots: int, service_s: float, arrivals_s: Sequence[float]) -> list[float]:
    """Return how long each request waits for one of ``slots``, which each serve in a fixed time."""
    free_s, waits = [0.0] * slots, []
    for arrived_s in arrivals_s:
        begin_s = max(arrived_s, heappop(free_s))
        heappush(free_s, begin_s + service_s)
        waits.append(begin_s - arrived_s)
    return waits


def simulate(rate: float, slots: int, service_s: float, requests: int, seed: int) -> list[float]:
    params = ServeParams(request_rate=rate, num_requests=requests, seed=seed)
    return waits_s(slots, service_s, params.offsets_s())


@pytest.mark.parametrize("capacity", [4.0, 10.0, 25.0])
@pytest.mark.parametrize(
    "limit",
    [slo(ttft=0.2), slo(ttft=1.0, attainment=0.9), slo(e2e=2.0, attainment=1.0), slo(ttft=5)],
    ids=str,
)
def test_a_load_five_percent_above_capacity_is_long_enough_to_show(limit: Slo, capacity: float) -> None:
    """Even arrivals: a queue grows only above capacity, so that the maximum is the capacity."""
    for rate, within in ((capacity * 0.999, True), (capacity * 1.051, False)):
        requests = probe_requests(rate, limit, TOLERANCE)
        waits = waits_s(1, 1 / capacity, [place / rate for place in range(requests)])
        longest = limit.ttft_s or (limit.e2e_s or 0.0)
        share = sum(wait <= longest + 1e-9 for wait in waits) / requests
        assert (share >= limit.attainment) == within


def test_a_load_has_enough_requests_to_count_a_share() -> None:
    assert probe_requests(1.0, slo(tpot=0.05), 0.05) == 100
    assert probe_requests(1.0, slo(tpot=0.05, attainment=0.9), 0.05) == 32
    assert probe_requests(1.0, slo(tpot=0.05, attainment=1.0), 0.05) == 100
    assert probe_requests(1.0, slo(tpot=0.05, attainment=0.999), 0.05) == 1000
    # A limit of ten seconds needs minutes.
    assert probe_requests(10.0, slo(e2e=10.0), 0.05) == 2122
    assert [probe_rounds(requests, slo(ttft=1)) for requests in (100, 149, 150, 300, 2000)] == [3, 3, 2, 1, 1]
    assert [allowed_misses(requests, slo(ttft=1)) for requests in (99, 100, 300)] == [0, 1, 3]
    assert allowed_misses(300, slo(ttft=1, attainment=1.0)) == 0


def test_loads_that_show_nothing_are_refused() -> None:
    for given, limits in ((100, slo(ttft=1)), (None, slo(ttft=1)), (1, slo(ttft=1, attainment=1.0))):
        check_loads(given, limits, 0.05, 600, 600)
    with pytest.raises(PlanError, match="num_requests is 99, needs 100 or more, because 99 % of fewer"):
        check_loads(99, slo(ttft=1), 0.05, 600, 600)
    limits = slo(e2e=30)
    check_loads(None, limits, 0.05, 640, 800)
    message = "takes 636 s with E2E <= 30 s for 99 %, more than budget=600 and nine tenths of --"
    with pytest.raises(PlanError, match=message):
        check_loads(None, limits, 0.05, 600, 600)


def share(rate: float, slots: int, service_s: float, limits: Slo, seeds: Sequence[int]) -> float:
    """Return the share of requests of all rounds that meet a limit of TTFT."""
    requests = probe_requests(rate, limits, TOLERANCE)
    waits = [wait for seed in seeds for wait in simulate(rate, slots, service_s, requests, seed)]
    return sum(wait <= (limits.ttft_s or 0.0) for wait in waits) / len(waits)


def search(
    slots: int, service_s: float, limits: Slo, seed: int, noise_s: float = 0.0
) -> tuple[LoadSearch, dict[float, list[Round]]]:
    """Search as ``energy.max_load`` does; return the search and the rounds of each rate."""
    noise, measured = Random(seed), dict[float, list[Round]]()

    def within(rate: float) -> bool:
        requests = probe_requests(rate, limits, TOLERANCE)
        needed, rounds = probe_rounds(requests, limits), list[Round]()
        while not (rounds and is_decided(rounds, limits, needed)):
            waits = simulate(rate, slots, service_s, requests, seed + len(rounds))
            shown = [(wait + noise.uniform(0, noise_s), None, 1.0, 1) for wait in waits]
            rounds.append(load(shown, limits=limits))
        measured[rate] = rounds
        result = is_within(rounds, limits)
        assert result is not None
        return result

    capacity = slots / service_s
    found = LoadSearch.between((capacity / 8, capacity * 3), TOLERANCE)

    def confirm(rate: float) -> bool:
        seeds = [seed + number for number in range(MAX_PROBE_ROUNDS)]
        return share(rate, slots, service_s, limits, seeds) >= limits.attainment

    found.run(within, confirm, lambda: True, "no time left")
    return found, measured


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "service_s"), [(1, 0.1), (4, 0.2), (2, 0.05)])
def test_the_maximum_of_a_queue_of_known_capacity_is_found(slots: int, service_s: float, seed: int) -> None:
    """Probes scatter by up to 10 ms, as on a real host; the true maximum has no scatter."""
    limits = slo(ttft=0.3)
    seeds = [seed, seed + 1, seed + 2]
    true = slots / service_s / 4
    while share(true * 1.005, slots, service_s, limits, seeds) >= limits.attainment:
        true *= 1.005
    found, measured = search(slots, service_s, limits, seed, noise_s=0.01)
    assert found.maximum == pytest.approx(true, rel=0.05)
    assert len(measured) <= found.steps + 3


@pytest.mark.parametrize("limit_s", [5.0, 10.0])
def test_no_rate_above_capacity_by_more_than_the_tolerance_is_found(limit_s: float) -> None:
    """Long limits, which take a long queue to miss; 20 requests/s is the capacity."""
    for seed in range(3):
        found, _ = search(2, 0.1, slo(ttft=limit_s), 100 * seed)
        assert found.maximum is not None
        assert 0.95 * 20 < found.maximum <= 1.05 * 20


@pytest.mark.parametrize("load_share", [0.9, 0.95, 0.99])
def test_loads_close_to_the_capacity_do_not_exceed(load_share: float) -> None:
    """Of limits that the queue of an endless load misses in less than one of a hundred requests."""
    limits = slo(ttft=10)
    for seed in range(3):
        rate = load_share * 20
        requests = probe_requests(rate, limits, TOLERANCE)
        rounds = [load([(w, None, 1.0, 1) for w in simulate(rate, 2, 0.1, requests, seed)], limits=limits)]
        assert is_within(rounds, limits) is True


def test_the_uncertainty_of_the_arrivals_is_of_the_size_of_what_other_seeds_give() -> None:
    limits = slo(ttft=0.3)
    found_by_seed, us = [], []
    for seed in range(0, 1000, 100):
        found, measured = search(4, 0.1, limits, seed)
        rate = found.maximum
        assert rate is not None
        requests = probe_requests(rate, limits, TOLERANCE)
        rounds = [
            load([(w, None, 1.0, 1) for w in simulate(rate, 4, 0.1, requests, seed + k)], limits=limits)
            for k in range(3)
        ]
        lower = {each: shown for each, shown in measured.items() if is_within(shown, limits)}
        u = arrivals_uncertainty(rate, rounds, lower, limits, TOLERANCE)
        assert u is not None
        found_by_seed.append(rate)
        us.append(u)
    middle = median(found_by_seed)
    covered = sum(abs(rate - middle) <= 2 * u for rate, u in zip(found_by_seed, us, strict=True))
    assert covered >= 8
    # Not by uncertainties without limit.
    assert 0.02 * middle < median(us) < 0.3 * middle


def test_the_uncertainty_of_the_arrivals_is_the_largest_difference_of_two_rounds() -> None:
    """Latencies rise with the square of the rate: 0.25 of the limit at half of it, and 1 at the maximum."""
    lower = {0.005: [waiting(0.25)], 0.0099: [waiting(0.9)]}
    u = arrivals_uncertainty(0.01, [waiting(1.0), waiting(0.9), waiting(0.81)], lower, LIMITS, 0.001)
    # The latencies of the last round reach the limit at 0.01 / 0.9; in logarithms.
    assert u == pytest.approx(0.01 * 0.10536, rel=1e-3)
    assert arrivals_uncertainty(0.01, [waiting(1.0)], lower, LIMITS, 0.001) is None
    # Without a lower rate, latencies are taken to rise with the root of the rate.
    u = arrivals_uncertainty(0.01, [waiting(1.0), waiting(0.9)], {}, LIMITS, 0.001)
    assert u == pytest.approx(0.01 * 2 * 0.10536, rel=1e-3)


@pytest.mark.parametrize(
    ("longest", "shortest", "below", "u"),
    [
        # As long at half of the rate: they are taken to rise with the root of the rate.
        (1.0, 0.9, 1.0, 2 * 0.10536),
        # Below a twentieth of the limit they tell nothing, and count as a twentieth.
        (0.2, 0.001, 0.1, 2 * math.log(4)),
    ],
)
def test_the_uncertainty_of_the_arrivals_has_limits_where_latencies_hardly_rise(
    longest: float, shortest: float, below: float, u: float
) -> None:
    rounds = [waiting(longest), waiting(shortest)]
    found = arrivals_uncertainty(0.01, rounds, {0.005: [waiting(below), waiting(below)]}, LIMITS, 0.001)
    assert found is not None
    assert found == pytest.approx(0.01 * u, rel=1e-3)


@pytest.mark.parametrize(
    ("others", "tpot_s", "unseen"),
    [
        ({}, 0.5, 1 / 0.9 - 1),
        # 20 requests in 10 s: 21 times these limits over the attainment are 9.5 and 10.6 s.
        ({"ttft": 0.45}, 0.5, 0.0),
        ({"e2e": 0.45}, 0.5, 0.0),
        ({"ttft": 0.5}, 0.5, 1 / 0.9 - 1),
        # The rate above exceeds a limit that a queue does not break.
        ({}, 1.1, 0.0),
        ({"ttft": 0.5}, 1.1, 0.0),
    ],
)
def test_what_only_saturation_shows_is_in_the_uncertainty(
    others: dict[str, float], tpot_s: float, unseen: float
) -> None:
    limits = slo(tpot=1.0, **others)
    same = [load([(0.1, 0.5, 0.4, 3)] * 20, limits=limits)]
    above = [load([(0.1, tpot_s, 0.4, 3)] * 20, limits=limits)]
    u = arrivals_uncertainty(2.0, same * 3, {1.0: same}, limits, 0.05, above)
    assert u == pytest.approx(2 * math.hypot(0.05, unseen) / 3**0.5)


@pytest.mark.parametrize("seed", [0, 100])
def test_the_uncertainty_of_loads_that_are_too_short_reaches_the_capacity(seed: int) -> None:
    """200 requests keep a limit of 2.5 s at these rates, so that only saturation ends the search."""
    limits, capacity, measured = slo(ttft=2.5), 32, dict[float, list[Round]]()

    def make_round(rate: float, number: int) -> Round:
        made = queued(capacity, arrivals_s(capacity, rate / capacity, 200, seed + number))
        _, flags = load_phases(made, None, 0, 10**15)
        times_s = [((each.first_token_ns or 0) - (each.start_ns or 0)) / 1e9 for each in made]
        return load([(ttft_s, None, ttft_s + 0.75, 2) for ttft_s in times_s], limits=limits, flags=flags)

    def within(rate: float) -> bool:
        measured[rate] = [make_round(rate, number) for number in range(MAX_PROBE_ROUNDS)]
        return bool(is_within(measured[rate], limits))

    found = LoadSearch.between((capacity / 2, capacity * 2), TOLERANCE)
    found.run(within, within, lambda: True, "no time left")
    rate, exceeded = found.maximum, found.exceeded
    assert rate is not None
    assert exceeded is not None
    assert rate > 1.05 * capacity
    lower = {each: rounds for each, rounds in measured.items() if is_within(rounds, limits)}
    u = arrivals_uncertainty(rate, measured[rate], lower, limits, TOLERANCE, measured[exceeded])
    assert u is not None
    assert rate - 2 * math.hypot(u, found.uncertainty or 0.0) <= capacity


LIMITS = slo(ttft=1.0, attainment=0.9)
INVALID = Flag(name="gpu-processes", severity="invalid", detail="x")
SATURATED, SHORT, ENDED, REFUSED = (
    Flag(name=name, severity="warning", detail="x")
    for name in ("saturated", "short-load", "ended-early", "refused")
)


def waiting(seconds: float, bad: int = 0, flags: Sequence[Flag] = ()) -> Round:
    """A round of 20 requests that wait so long, except for ``bad`` ones."""
    requests = [(2.0 if place < bad else seconds, None, 3.0, 1) for place in range(20)]
    return load(requests, limits=LIMITS, flags=flags)


def decided(*rounds: Round) -> bool:
    return is_decided(rounds, LIMITS, 3)


def test_a_clear_round_decides_and_close_ones_count_together() -> None:
    assert decided(waiting(0.5))
    assert not decided(waiting(0.51))
    close, missed = waiting(0.9), waiting(0.9, bad=3)
    assert not decided(close)
    assert is_decided([close], LIMITS, 1)
    assert not decided(close, close)
    assert decided(close, close, close)
    # Six of 60 requests may be late: seven decide, however many rounds follow.
    assert decided(waiting(0.9, bad=7))
    assert not decided(waiting(0.9, bad=6))
    assert decided(missed, waiting(0.9, bad=4))
    assert not decided(missed, missed)
    assert is_within([close, waiting(0.9, bad=4), missed], LIMITS) is False
    assert is_within([close, missed, missed], LIMITS) is True


@pytest.mark.parametrize("flag", [SATURATED, SHORT, ENDED, REFUSED], ids=lambda flag: flag.name)
def test_a_round_without_a_steady_state_or_end_needs_no_other_one(flag: Flag) -> None:
    assert decided(waiting(0.9, flags=[flag]))


def test_one_disturbed_round_does_not_end_the_search_too_low() -> None:
    """A stall of the host makes 3 of 20 requests late: not within the SLO, and not a clear result."""
    stalled = waiting(0.2, bad=3)
    assert not decided(stalled)
    assert is_within([stalled, waiting(0.2), waiting(0.2)], LIMITS) is True


def test_the_requests_of_all_rounds_decide() -> None:
    """Two rounds without a late request and one with 7 of 20: 7 of 60 are late, and 6 are allowed."""
    assert is_within([waiting(0.2), waiting(0.2), waiting(0.2, bad=7)], LIMITS) is False
    assert is_within([waiting(0.2), waiting(0.2), waiting(0.2, bad=6)], LIMITS) is True


def test_a_saturated_load_is_within_no_slo() -> None:
    saturated = waiting(0.1, flags=[SATURATED])
    assert is_within([saturated], LIMITS) is False
    assert is_within([saturated], None) is False
    assert is_within([saturated, waiting(0.1)] * 2, LIMITS) is False
    assert is_within([waiting(5.0)], None) is True


@pytest.mark.parametrize("seconds", [0.1, 5.0])
def test_a_short_load_is_neither_within_nor_exceeding(seconds: float) -> None:
    short = waiting(seconds, flags=[SHORT])
    assert is_within([short, waiting(seconds)], LIMITS) is None
    assert is_within([short], None) is None
    assert is_within([short, waiting(seconds), waiting(seconds)], LIMITS) is (seconds < 1)
    # Its requests take 3 s; a steady state of 9 s needs 15 s.
    assert steady_requests([short], 10.0, 20) == 150
    assert steady_requests([short], 1.0, 20) == 40


def test_a_load_that_ended_early_exceeds() -> None:
    good = waiting(0.1)
    assert is_within([good, waiting(0.1, flags=[ENDED])], LIMITS) is False
    assert is_within([good, waiting(0.1, flags=[REFUSED])], LIMITS) is False
    assert is_within([good, waiting(0.1, flags=[ENDED, INVALID])], LIMITS) is True


def test_invalid_rounds_decide_nothing() -> None:
    invalid = waiting(0.1, flags=[INVALID])
    assert not decided(invalid)
    assert decided(*[invalid] * MAX_PROBE_ROUNDS)
    assert is_within([invalid], LIMITS) is None
