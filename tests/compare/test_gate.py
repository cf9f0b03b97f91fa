# SPDX-License-Identifier: Apache-2.0
"""Gates: thresholds, floors and budgets as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.compare.gate import (
    parse_budget,
    parse_fail_on,
    rule_with_floor,
)
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.record import Metric


@pytest.mark.parametrize(
    ("text", "metric", "relative", "absolute"),
    [
        ("energy_j:3%", "energy_j", 0.03, 0.0),
        ("energy_j:3.5%", "energy_j", 0.035, 0.0),
        ("energy_j:.5%", "energy_j", 0.005, 0.0),
        ("energy_j:150%", "energy_j", 1.5, 0.0),
        (" energy_j : 3 % ", "energy_j", 0.03, 0.0),
        ("energy_per_output_token_j:2.5%+0.1J", "energy_per_output_token_j", 0.025, 0.1),
        ("energy_per_output_token_j:2.5%+100mJ/token", "energy_per_output_token_j", 0.025, 0.1),
        ("energy_j:3% + 2 kJ", "energy_j", 0.03, 2000.0),
        ("mean_power_w:5%+1.5W", "mean_power_w", 0.05, 1.5),
        ("duration_s:5%+10ms", "duration_s", 0.05, 0.01),
        ("output_tokens_per_s:5%", "output_tokens_per_s", 0.05, 0.0),
        ("output_tokens_per_s:5%+2tokens/s", "output_tokens_per_s", 0.05, 2.0),
    ],
)
def test_threshold_is_parsed(text: str, metric: str, relative: float, absolute: float) -> None:
    threshold = parse_fail_on(text)
    assert threshold.metric == metric
    assert threshold.relative == pytest.approx(relative, rel=1e-12)
    assert threshold.absolute == pytest.approx(absolute, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "%",
        "-3%",
        "0%",
        "3%%",
        "3%+",
        "3%+2",
        "3%+2W",
        "3%2J",
        "2J",
        "1.2.3%",
        "nan%",
        "3%+9e999J",
        "1e999%",
    ],
)
def test_malformed_threshold_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_fail_on(f"energy_j:{text}")
    assert str(caught.value) == (
        f"invalid threshold {text!r} of energy_j; expected a percentage, such as '3%' or '3%+2J'"
    )


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("Energy_j", "did you mean energy_j?"),
        ("prefil_energy_j", "did you mean prefill_energy_j?"),
        ("", "the nearest names are "),
        ("w %", "the nearest names are "),
    ],
)
def test_unknown_metric_is_refused_with_the_nearest_names(metric: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_fail_on(f"{metric}:3%")
    assert str(caught.value).startswith(f"unknown metric {metric!r}; {hint}")
    assert len(str(caught.value)) < 160


def test_threshold_changes_only_its_part_of_the_rule() -> None:
    common = Rule(floor=0.02, alpha=0.01)
    assert parse_fail_on("energy_j:4%+2J").rule(common) == Rule(
        threshold=0.04, threshold_absolute=2.0, floor=0.02, alpha=0.01
    )


def test_tolerance_is_raised_to_the_threshold_and_the_floor() -> None:
    assert parse_fail_on("energy_j:8%").rule().tolerance == pytest.approx(0.08)
    assert rule_with_floor(0.08) == Rule(floor=0.08, tolerance=0.08)


def test_documented_metrics_and_units_match_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numbers.md").read_text()
    section = text.split("\n## Metrics\n")[1].split("\n## ")[0]
    documented: dict[str, str] = {}
    for row in section.splitlines():
        if not row.startswith("|`"):
            continue
        names, units = (cell.strip().split(", ") for cell in row.split("|")[1:3])
        documented.update(zip(names, units if len(units) == len(names) else units * len(names), strict=True))
    written = {name.strip("`"): _energy_alone(unit) for name, unit in documented.items()}
    assert written == {name: _energy_alone(kind.unit) for name, kind in METRICS.items()}


def _energy_alone(unit: str) -> str:
    return "J" if unit.startswith("J/") else unit


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


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            "wer",
            "wer is not built in, and a budget cannot limit a custom metric; use assert in the test",
        ),
        (
            "output_tokens_per_s",
            "more is better for output_tokens_per_s, so a budget cannot limit it; use a threshold or assert",
        ),
        ("energy_jj", "unknown metric 'energy_jj'; did you mean energy_j?"),
    ],
)
def test_metric_without_a_budget_is_refused(metric: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_budget(metric, "2")
    assert str(caught.value) == message


def test_value_over_the_budget_fails() -> None:
    budget = parse_budget(None, "300 mJ")
    assert budget.check({"energy_j": Metric(value=0.3, unit="J")}) is None
    over = Metric(value=0.3001, unit="J", uncertainty=0.01, uncertainty_absolute=0.0123, n=3)
    assert budget.check({"energy_j": over}) == (
        "energy_gate: energy_j is 300.1 ± 12.3 mJ, over the budget of 300 mJ"
    )
    assert budget.check({"energy_j": Metric(value=1.0, unit="J")}) == (
        "energy_gate: energy_j is 1 J, over the budget of 300 mJ"
    )


def test_an_uncertainty_larger_than_the_value_has_three_digits_too() -> None:
    over = Metric(value=194e-6, unit="J", uncertainty=2e-4, uncertainty_absolute=2.2e-4, n=3)
    found = parse_budget(None, "100 uJ").check({"energy_j": over})
    assert found == "energy_gate: energy_j is 194 ± 220 µJ, over the budget of 100 uJ"


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
