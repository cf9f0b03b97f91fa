# SPDX-License-Identifier: Apache-2.0
"""Thresholds as people write them, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.compare.gate import BUDGET_UNITS, parse_fail_on, parse_floor, parse_threshold
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.statistics import Rule
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.metrics import FIGURES


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
        ("peak_memory_bytes:1%+64MB", "peak_memory_bytes", 0.01, 64e6),
    ],
)
def test_thresholds(text: str, metric: str, relative: float, absolute: float) -> None:
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
    ],
)
def test_what_is_no_threshold(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_fail_on(f"energy_j:{text}")
    assert str(caught.value) == (
        f"threshold {text!r} of energy_j is no percentage above zero, such as '3%' or '3%+2J'"
    )


def test_an_absolute_part_of_nothing() -> None:
    with pytest.raises(PlanError) as caught:
        parse_threshold(None, "3%+0J")
    assert str(caught.value) == "threshold '3%+0J' of energy_j adds nothing: write '3%' alone"


def test_a_threshold_without_a_metric() -> None:
    with pytest.raises(PlanError) as caught:
        parse_fail_on("3%")
    assert str(caught.value).startswith("'3%' is no METRIC:PERCENT%, such as 'energy_j:3%'")


@pytest.mark.parametrize("metric", ["joules", "Energy_j", ""])
def test_an_unknown_metric(metric: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_fail_on(f"{metric}:3%")
    assert str(caught.value) == f"unknown metric {metric!r}; a gate can compare: {', '.join(FIGURES)}"


def test_the_rule_of_a_threshold_keeps_what_is_common() -> None:
    common = Rule(floor=0.02, alpha=0.01)
    assert parse_fail_on("energy_j:4%+2J").rule(common) == Rule(
        threshold=0.04, threshold_absolute=2.0, floor=0.02, alpha=0.01
    )


def test_no_change_lies_between_tolerance_and_threshold() -> None:
    assert parse_fail_on("energy_j:8%").rule().tolerance == pytest.approx(0.08)


def test_more_tokens_a_second_are_better_and_have_no_budget() -> None:
    assert parse_fail_on("output_tokens_per_s:5%").better == "more"
    assert parse_fail_on("energy_j:5%").better == "less"
    assert {name for name, kind in METRICS.items() if kind.better == "more"} == set(METRICS) - set(
        BUDGET_UNITS
    )


def test_the_table_has_every_metric_of_the_documentation_and_its_unit() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numbers.md").read_text()
    section = text.split("\n## Metrics\n")[1].split("\n## ")[0]
    documented: dict[str, str] = {}
    for row in section.splitlines():
        if not row.startswith("| `"):
            continue
        names, units = (cell.strip().split(", ") for cell in row.split("|")[1:3])
        documented.update(zip(names, units if len(units) == len(names) else units * len(names), strict=True))
    written = {
        name.strip("`"): unit.removesuffix("/token").removesuffix("/request")
        for name, unit in documented.items()
    }
    assert written == {name: kind.unit for name, kind in METRICS.items()}


def test_a_floor_is_a_percentage_and_raises_the_tolerance_to_it() -> None:
    assert parse_floor(" 2.5 % ") == Rule(floor=0.025)
    assert parse_floor("8%") == Rule(floor=0.08, threshold=0.08, tolerance=0.08)
    assert parse_floor("0%").floor == 0


@pytest.mark.parametrize("text", ["", "2", "-1%", "100%", "nan%", "2%%"])
def test_what_is_no_floor_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^floor '.*' is no percentage below 100%, such as '1%'$"):
        parse_floor(text)


@pytest.mark.parametrize("text", ["1001%", "1e9%", "1e999%"])
def test_a_threshold_that_nothing_reaches_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r" of energy_j would let everything pass; 1000% is the most$"):
        parse_fail_on(f"energy_j:{text}")
