# SPDX-License-Identifier: Apache-2.0
"""The search for the maximum load; test_load_probe.py has what decides about a rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.loads import LoadSearch

BETWEEN, TOLERANCE = (0.5, 32.0), 0.05


def search(
    within: Callable[[float], bool | None],
    between: tuple[float, float] = BETWEEN,
    tolerance: float = TOLERANCE,
    confirm: Callable[[float], bool | None] | None = None,
    probes: int = 1000,
) -> tuple[LoadSearch, list[float]]:
    """Search with at most so many probes; return the search and the rates it measured."""
    found, rates = LoadSearch.between(between, tolerance), list[float]()

    def probe(rate: float) -> bool | None:
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


def test_a_probe_without_a_result_ends_the_search_with_its_bracket() -> None:
    found, rates = search(lambda rate: None if 8 < rate < 20 else rate <= 9.7)
    assert len(rates) > 1
    assert found.maximum is not None
    assert found.maximum <= 8
    assert found.exceeded in (None, *rates)
    assert found.describe_end() == "no time left"


def test_a_maximum_that_could_not_be_measured_in_full_stays() -> None:
    found, _ = search(lambda rate: rate <= 10, confirm=lambda _: None)
    assert found.maximum is not None
    assert found.describe_end() == "no time left"


def test_the_uncertainty_is_that_of_the_bracket() -> None:
    found, _ = search(lambda rate: rate <= 9.7)
    assert found.exceeded is not None
    assert found.maximum is not None
    assert found.uncertainty == pytest.approx((found.exceeded - found.maximum) / 3**0.5)


def test_an_open_bracket_has_no_uncertainty() -> None:
    assert search(lambda _: True)[0].uncertainty is None
    assert search(lambda _: False)[0].uncertainty is None


def test_measurements_that_contradict_each_other_widen_the_uncertainty() -> None:
    """Short probes hold up to 10 requests per second, full measurements up to 8: from 8 to 10 is unknown."""
    found, _ = search(lambda rate: rate <= 10, confirm=lambda rate: rate <= 8)
    assert found.exceeded is not None
    assert found.maximum is not None
    bracket = (found.exceeded - found.maximum) / 3**0.5
    assert found.held > 9.7
    assert found.uncertainty == pytest.approx(math.hypot(bracket, (found.held - found.exceeded) / 12**0.5))
    assert (found.uncertainty or 0.0) > 3 * bracket
