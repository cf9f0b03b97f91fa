# SPDX-License-Identifier: Apache-2.0
"""What a check tells of a power reading."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_llenergy.meters.power_readings import Refresh, refresh_from_check, refresh_with_period
from pytest_llenergy.meters.selfcheck import CheckResult, Reading, evaluate_readings

UNKNOWN = Refresh(0.1, 0.1, (0.0, 0.2), known=False)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # Each refresh is looked for. It tells what was up to a refresh before.
        (CheckResult(1.0, power_period_s=0.1, power_changes=8), Refresh(0.1, late_s=(0.05, 0.1))),
        # It moves all the time: what it tells is of the moment.
        (CheckResult(1.0, power_period_s=0.002, power_continuous=True), Refresh(0.002, 0.002)),
        # Refreshed too often to look for each.
        (CheckResult(1.0, power_period_s=0.01, power_changes=99), Refresh(0.01, 0.01, (0.0, 0.02))),
        # It did not change, or nobody looked.
        (CheckResult(1.0), UNKNOWN),
        (None, UNKNOWN),
        # It changed a few times, or more slowly than it can be refreshed: so did the power.
        (CheckResult(1.0, power_period_s=0.1, power_changes=7), UNKNOWN),
        (CheckResult(1.0, power_period_s=0.2, power_changes=8), UNKNOWN),
    ],
)
def test_a_refresh_is_what_was_seen_or_is_not_known(result: CheckResult | None, expected: Refresh) -> None:
    assert refresh_from_check(result, slowest_s=0.1) == expected


@pytest.mark.parametrize(("share", "late_s"), [(1.0, 0.1), (0.25, 0.0625), (0.0, 0.05)])
def test_a_mean_is_as_late_as_its_middle(share: float, late_s: float) -> None:
    """It stands for the 100 ms that begin with it, and is of the end of the 100 ms before."""
    assert refresh_with_period(0.1, share).late_s == pytest.approx((late_s, late_s))


def watched(watts: Callable[[float], float]) -> CheckResult:
    moments = [index * 0.0015 for index in range(1000)]
    return evaluate_readings(
        [Reading(round(t * 1e9), round(t * 1e9) + 50_000, None, watts(t)) for t in moments]
    )


def test_a_load_that_goes_up_and_down_does_not_pass_for_the_refresh() -> None:
    assert refresh_from_check(watched(lambda t: 400.0 if t % 0.4 < 0.2 else 100.0), 0.1) == UNKNOWN


def test_a_refresh_that_seldom_changes_anything_is_not_known() -> None:
    assert refresh_from_check(watched(lambda t: 100.0 + 0.2 * (t // 0.3)), 0.1) == UNKNOWN


def test_a_refresh_that_always_changes_something_is_found() -> None:
    found = refresh_from_check(watched(lambda t: 100.0 + t // 0.1 % 7), 0.1)
    assert found.period_s == pytest.approx(0.1, rel=0.02)
    assert found.known
