# SPDX-License-Identifier: Apache-2.0
"""A metric of a record has one value: in the table, in a verdict, in JSON and in the history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.history import add_run, read_entries
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record, Round, Tokens
from pytest_llenergy.record.report import encode_report
from pytest_llenergy.report.columns import COLUMNS

from ..compare.runs import record_of, report_of, round_of

#: Seconds of the rounds: two of eight are far longer, as under a burst of other load.
SECONDS = (0.28, 0.29, 11.1, 0.27, 0.28, 5.1, 0.30, 0.28)

#: Watts, nearly the same in all rounds.
WATTS = (13.0, 13.1, 12.9, 13.2, 13.0, 13.1, 12.8, 13.0)

TOKENS = 32

METRICS = (
    "energy_j",
    "energy_per_output_token_j",
    "mean_power_w",
    "duration_s",
    "output_tokens_per_s",
)


def skewed() -> list[Round]:
    return [
        round_of(
            watts * seconds,
            iterations=1,
            duration_s=seconds,
            tokens=Tokens(input=10, output=TOKENS),
            requests=1,
        )
        for seconds, watts in zip(SECONDS, WATTS, strict=True)
    ]


def record(**changes: Any) -> Record:
    return record_of("t.py::test_decode", rounds=skewed(), params={}, **changes)


def test_every_metric_is_the_median_over_rounds() -> None:
    values = {name: record().value_of(name) for name in METRICS}
    assert values["duration_s"] == pytest.approx(0.285)
    assert values["energy_j"] == pytest.approx((0.28 * 13.0 + 0.29 * 13.1) / 2, rel=0.01)
    # Tokens over the time of the same rounds: the mean of the rates would be 92 token/s, and of all
    # rounds together 14.
    assert values["output_tokens_per_s"] == pytest.approx(TOKENS / 0.285)
    # So joules per token, tokens per second and watts agree with each other.
    watts = values["energy_per_output_token_j"] * values["output_tokens_per_s"]  # type: ignore[operator]
    assert watts == pytest.approx(values["mean_power_w"], rel=0.02)


@pytest.mark.parametrize("name", METRICS)
def test_table_verdict_json_and_history_show_the_same_value(name: str, tmp_path: Path) -> None:
    made = record()
    metric = made.metrics[name]
    value = metric.value
    assert value is not None
    report = report_of(made)
    stored = json.loads(encode_report(report))["records"][0]["metrics"][name]["value"]
    assert stored == value
    (comparison,) = compare_reports(report, report, ("a", "b"), [Criterion(metric=name)]).comparisons
    assert (comparison.base, comparison.head) == (value, value)
    if name.endswith("_j"):
        assert COLUMNS[name].cell(made) == format_quantity(value, metric.uncertainty, "J")
    elif name != "mean_power_w":
        assert COLUMNS[name].cell(made) == f"{value:.3g}"
    store = tmp_path / "history"
    add_run(report, "a.json", store, allow_dirty=True)
    assert [entry.value for entry in read_entries(store) if entry.metric == name] == [value]
