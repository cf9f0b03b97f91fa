# SPDX-License-Identifier: Apache-2.0
"""Budgets: units and prefixes, what is no quantity, and the judgement."""

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
def test_quantities(metric: str | None, text: str, limit: float) -> None:
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
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budget(None, text)
    assert str(caught.value) == f"budget {text!r} of energy_j is no quantity in J, such as '5 J'"


@pytest.mark.parametrize("metric", ["joules", "output_tokens_per_s"])
def test_metrics_without_an_upper_limit(metric: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budget(metric, "5 J")
    assert str(caught.value) == f"unknown metric {metric!r}; a budget can bound: {', '.join(BUDGET_UNITS)}"


def test_within_and_over() -> None:
    budget = parse_budget(None, "300 mJ")
    assert budget.judge({"energy_j": Metric(value=0.3, unit="J")}) is None
    over = Metric(value=0.3001, unit="J", uncertainty=0.01, uncertainty_absolute=0.0123, n=3)
    assert budget.judge({"energy_j": over}) == (
        "energy_gate: energy_j is 0.3001 ± 0.012 J, over the budget of 300 mJ"
    )
    assert budget.judge({"energy_j": Metric(value=1.0, unit="J")}) == (
        "energy_gate: energy_j is 1 J, over the budget of 300 mJ"
    )


def test_a_missing_value_is_no_pass() -> None:
    budget = parse_budget(None, "5 J")
    missing = Metric(value=None, unit="J", reason="nvml: GPU is lost")
    assert budget.judge({"energy_j": missing}) == (
        "energy_gate: energy_j has no value (nvml: GPU is lost), so its budget cannot be checked"
    )
    assert budget.judge({"duration_s": Metric(value=1.0, unit="s")}) == (
        "energy_gate: energy_j has no value (nothing was measured), so its budget cannot be checked"
    )
    assert budget.judge({"energy_j": Metric(value=float("nan"), unit="J")}) is not None
