# SPDX-License-Identifier: Apache-2.0
"""The search for the maximum load, on queues whose maximum a calculation gives, without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest

from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.load_search import (
    MAX_PROBE_ROUNDS,
    LoadSearch,
    is_decided,
    is_within,
    probe_requests,
)
from pytest_llenergy.model.load_curve import Slo, slo
from pytest_llenergy.model.record import Flag, Round

from .test_goodput import load

BETWEEN, TOLERANCE = (0.5, 32.0), 0.05


def search(
    within: Callable[[float], bool],
    between: tuple[float, float] = BETWEEN,
    tolerance: float = TOLERANCE,
    confirm: Callable[[float], bool] | None = None,
    probes: int = 1000,
) -> tuple[LoadSearch, list[float]]:
    """Search with at most so many probes; return the search and the rates it measured."""
    found, rates = LoadSearch.between(between, tolerance), list[float]()

    def probe(rate: float) -> bool:
        rates.append(rate)
        return within(rate)

    found.run(probe, confirm or within, lambda: len(rates) < probes, "no time left")
    return found, rates


@pytest.mark.parametrize("maximum", [0.51, 1.0, 3.999, 4.0, 9.7, 31.0])
@pytest.mark.parametrize("tolerance", [0.2, 0.05, 0.01])
def test_the_bracket_holds_the_maximum_and_was_measured(maximum: float, tolerance: float) -> None:
    found, rates = search(lambda rate: rate <= maximum, tolerance=tolerance)
    assert found.maximum is not None
    assert found.exceeded is not None
    assert found.maximum <= maximum < found.exceeded <= found.maximum * (1 + tolerance / 2) * (1 + 1e-6)
    assert {found.maximum, found.exceeded} <= set(rates)
    assert found.describe_end() is None
    assert len(rates) <= found.steps
    assert len(rates) == len(set(rates))


def test_a_range_that_is_within_the_slo_has_no_upper_bound() -> None:
    found, rates = search(lambda _: True)
    assert (found.maximum, found.exceeded) == (32.0, None)
    assert rates[-1] == 32.0
    assert found.describe_end() == (
        "even 32 request/s, the highest rate, is within the SLO; search higher rates"
    )


def test_a_range_that_exceeds_the_slo_has_no_maximum() -> None:
    found, rates = search(lambda _: False)
    assert (found.maximum, rates[-1]) == (None, 0.5)
    assert found.describe_end() == (
        "even 0.5 request/s, the lowest rate, is not within the SLO; search lower rates"
    )


def test_a_range_narrower_than_the_tolerance_is_measured_at_both_ends() -> None:
    found, rates = search(lambda rate: rate < 10.1, between=(10.0, 10.2))
    assert rates == [10.0, 10.2]
    assert (found.maximum, found.exceeded) == (10.0, 10.2)


def test_the_budget_ends_the_search_with_what_was_measured() -> None:
    found, rates = search(lambda rate: rate <= 9.7, probes=3)
    assert len(rates) == 3
    assert found.maximum is not None
    assert found.maximum <= 9.7
    assert found.describe_end() == "no time left"


def test_a_maximum_that_fails_in_full_is_lowered() -> None:
    """Short probes hold up to 10 requests per second, full measurements up to 8."""
    found, _ = search(lambda rate: rate <= 10, confirm=lambda rate: rate <= 8)
    assert found.maximum is not None
    assert 8 / 1.06 < found.maximum <= 8
    assert found.exceeded is not None
    assert found.exceeded <= 10


def test_a_maximum_that_is_never_confirmed_is_none() -> None:
    found, _ = search(lambda rate: rate <= 10, confirm=lambda _: False)
    assert found.maximum is None
    assert "the latencies scatter: 3 rates met the SLO" in (found.describe_end() or "")


@pytest.mark.parametrize(
    ("between", "tolerance", "message"),
    [
        ((4, 1), 0.05, "max_load: between is (4, 1), needs the lowest and the highest request rate"),
        ((0, 1), 0.05, "between is (0, 1), needs"),
        ((1, math.inf), 0.05, "between is (1, inf), needs"),
        ((1, math.nan), 0.05, "between is (1, nan), needs"),
        (7, 0.05, "between is 7, needs"),
        ((1, 2), 5, "max_load: tolerance is 5, needs a share from 0.001 to 1, such as 0.05"),
        ((1, 2), "5%", "tolerance is '5%', needs"),
    ],
)
def test_invalid_searches_are_refused(between: Any, tolerance: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        LoadSearch.between(between, tolerance)
    assert message in str(caught.value)


def waits_s(slots: int, service_s: float, arrivals_s: Sequence[float]) -> list[float]:
    """Return how long each request waits for one of ``slots``, which each serve in a fixed time."""
    free_s, waits = [0.0] * slots, []
    for arrived_s in arrivals_s:
        begin_s = max(arrived_s, heappop(free_s))
        heappush(free_s, begin_s + service_s)
        waits.append(begin_s - arrived_s)
    return waits


def test_a_load_five_percent_above_capacity_is_long_enough_to_show() -> None:
    """Even arrivals: a queue grows only above capacity, so that the maximum is the capacity."""
    for limit in (slo(ttft=0.2), slo(ttft=1.0, attainment=0.9), slo(e2e=2.0, attainment=1.0)):
        for capacity in (4.0, 10.0, 25.0):
            for rate, within in ((capacity * 0.999, True), (capacity * 1.051, False)):
                requests = probe_requests(rate, limit, 0.05)
                waits = waits_s(1, 1 / capacity, [place / rate for place in range(requests)])
                longest = limit.ttft_s or (limit.e2e_s or 0.0)
                share = sum(wait <= longest + 1e-9 for wait in waits) / requests
                assert (share >= limit.attainment) == within


def test_a_load_has_enough_requests_to_count_a_share() -> None:
    assert probe_requests(1.0, slo(tpot=0.05), 0.05) == 100
    assert probe_requests(1.0, slo(tpot=0.05, attainment=0.9), 0.05) == 32
    assert probe_requests(1.0, slo(tpot=0.05, attainment=1.0), 0.05) == 100
    # A limit of ten seconds would need minutes.
    assert probe_requests(10.0, slo(e2e=10.0), 0.05) == 600


def simulate(rate: float, slots: int, service_s: float, limits: Slo, seed: int) -> list[float]:
    requests = probe_requests(rate, limits, TOLERANCE)
    params = ServeParams(request_rate=rate, num_requests=requests, seed=seed)
    return waits_s(slots, service_s, params.offsets_s())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "service_s"), [(1, 0.1), (4, 0.2), (2, 0.05)])
def test_the_maximum_of_a_queue_of_known_capacity_is_found(slots: int, service_s: float, seed: int) -> None:
    """Probes scatter by up to 10 ms, as on a real host; the true maximum has no scatter."""
    limits, noise = slo(ttft=0.3), Random(seed)
    capacity = slots / service_s

    def share(rate: float) -> float:
        waits = simulate(rate, slots, service_s, limits, seed)
        return sum(wait <= 0.3 for wait in waits) / len(waits)

    true = capacity / 4
    while share(true * 1.005) >= limits.attainment:
        true *= 1.005

    def within(rate: float) -> bool:
        waits, rounds = simulate(rate, slots, service_s, limits, seed), list[Round]()
        while not (rounds and is_decided(rounds, limits)):
            shown = [(wait + noise.uniform(0, 0.01), None, 1.0, 1) for wait in waits]
            rounds.append(load(shown, limits=limits))
        result = is_within(rounds, limits)
        assert result is not None
        return result

    found, rates = search(within, between=(capacity / 8, capacity * 3))
    assert found.maximum == pytest.approx(true, rel=0.05)
    assert len(rates) <= found.steps


LIMITS = slo(ttft=1.0, attainment=0.9)
INVALID = Flag(name="foreign-process", severity="invalid", detail="x")
SATURATED = Flag(name="saturated", severity="warning", detail="x")


def waiting(seconds: float, bad: int = 0, flags: Sequence[Flag] = ()) -> Round:
    """A round of 20 requests that wait so long, except for ``bad`` ones."""
    requests = [(2.0 if place < bad else seconds, None, 3.0, 1) for place in range(20)]
    return load(requests, limits=LIMITS, flags=flags)


def test_a_clear_round_decides_and_a_close_one_is_repeated() -> None:
    assert is_decided([waiting(0.5)], LIMITS)
    assert is_decided([waiting(0.5, bad=12)], LIMITS)
    assert is_decided([waiting(0.5, flags=[SATURATED])], LIMITS)
    close, missed = waiting(0.9), waiting(0.9, bad=3)
    assert not is_decided([close], LIMITS)
    assert is_decided([close, close], LIMITS)
    assert not is_decided([close, missed], LIMITS)
    assert is_decided([close, missed, missed], LIMITS)
    assert is_within([close, waiting(0.9, bad=4), missed], LIMITS) is False
    assert is_within([close, missed, close], LIMITS) is True


def test_one_disturbed_round_does_not_end_the_search_too_low() -> None:
    """A stall of the host makes 3 of 20 requests late: not within the SLO, and not a clear result."""
    stalled = waiting(0.2, bad=3)
    assert not is_decided([stalled], LIMITS)
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


def test_invalid_rounds_decide_nothing() -> None:
    invalid = waiting(0.1, flags=[INVALID])
    assert not is_decided([invalid], LIMITS)
    assert is_decided([invalid] * MAX_PROBE_ROUNDS, LIMITS)
    assert is_within([invalid], LIMITS) is None
