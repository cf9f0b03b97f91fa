# SPDX-License-Identifier: Apache-2.0
"""Budgets: parsing quantities, and checking metrics against them."""

from __future__ import annotations

import pytest

from pytest_llenergy.compare.gate import BUDGET_UNITS, parse_budget
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.record import Metric


@pytest.mark.parametrize(
    ("metric", "text", "limit"),
    [
        (None, "5 J", 5.0),
        (None, "5J", 5.0),
        ("energy_j", " 300 mJ ", 0.3),
        ("net_energy_j", "1.5 kJ", 1500.0),
        ("decode_energy_j", "2 MJ", 2e6),
        ("prefill_energy_j", "7 uJ", 7e-6),
        ("energy_per_output_token_j", "250 mJ/token", 0.25),
        ("energy_per_request_j", "1e2 J/request", 100.0),
        ("mean_power_w", "1.5 kW", 1500.0),
        ("duration_s", ".5 s", 0.5),
        ("time_to_first_token_s", "20 ms", 0.02),
        ("inter_token_latency_s", "2.5e-3 s", 0.0025),
        ("peak_memory_bytes", "2 GB", 2e9),
        ("peak_memory_bytes", "4096 B", 4096.0),
    ],
)
def test_budget_is_parsed(metric: str | None, text: str, limit: float) -> None:
    budget = parse_budget(metric, text)
    assert budget.limit == pytest.approx(limit, rel=1e-12)
    assert (budget.metric, budget.text) == (metric or "energy_j", text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "J",
        "-5 J",
        "5 W",
        "5 Wh",
        "5 j",
        "five J",
        "1.2.3 J",
        ". J",
        "5 TJ",
        "5 J J",
        "5 mmJ",
        "nan J",
        "inf J",
        "9e999 J",
    ],
)
def test_malformed_budget_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budget(None, text)
    assert (
        str(caught.value) == f"invalid budget {text!r} of energy_j; expected a quantity in J, such as '5 J'"
    )


@pytest.mark.parametrize("metric", ["joules", "output_tokens_per_s"])
def test_metric_without_a_budget_is_refused(metric: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budget(metric, "5 J")
    assert str(caught.value) == f"unknown metric {metric!r}; choose from: {', '.join(BUDGET_UNITS)}"


def test_value_over_the_budget_fails() -> None:
    budget = parse_budget(None, "300 mJ")
    assert budget.check({"energy_j": Metric(value=0.3, unit="J")}) is None
    over = Metric(value=0.3001, unit="J", uncertainty=0.01, uncertainty_absolute=0.0123, n=3)
    assert budget.check({"energy_j": over}) == (
        "energy_gate: energy_j is 0.3001 ± 0.012 J, over the budget of 300 mJ"
    )
    assert budget.check({"energy_j": Metric(value=1.0, unit="J")}) == (
        "energy_gate: energy_j is 1 J, over the budget of 300 mJ"
    )


def test_missing_value_fails() -> None:
    budget = parse_budget(None, "5 J")
    missing = Metric(value=None, unit="J", reason="nvml: GPU is lost")
    assert budget.check({"energy_j": missing}) == (
        "energy_gate: energy_j has no value (nvml: GPU is lost), so its budget cannot be checked"
    )
    assert budget.check({"duration_s": Metric(value=1.0, unit="s")}) == (
        "energy_gate: energy_j has no value (nothing was measured), so its budget cannot be checked"
    )
    assert budget.check({"energy_j": Metric(value=float("nan"), unit="J")}) is not None
