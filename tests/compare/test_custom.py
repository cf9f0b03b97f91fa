# SPDX-License-Identifier: Apache-2.0
"""Custom metrics in comparisons: verdicts from values, and every reason for having none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pytest_llenergy.ab.join import SideSessions
from pytest_llenergy.cli.compare import FORMATS, ComparisonResult, Format, render_comparison
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.custom import Value, compare_values
from pytest_llenergy.compare.gate import exit_code, list_void_gates, parse_threshold
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.custom_metrics import add_metric
from pytest_llenergy.record.record import Record

from .runs import TEST, record_of, report_of

RULE = Rule(threshold=0.05, threshold_absolute=0.0)


@pytest.mark.parametrize(
    ("base", "head", "better", "verdict"),
    [
        (2.0, 2.2, "less", "regressed"),
        (2.0, 1.8, "less", "improved"),
        (2.0, 2.08, "less", "worse"),
        (2.0, 2.01, "less", "unchanged"),
        (2.0, 2.0, "less", "unchanged"),
        (0.8, 0.7, "more", "regressed"),
        (0.8, 0.9, "more", "improved"),
        (0.8, 0.0, "more", "regressed"),
        (0.0, 0.5, "more", "improved"),
        (0.0, 0.5, "less", "regressed"),
        (0.0, 0.0, "less", "unchanged"),
        (-1.0, -2.0, "less", "invalid"),
        (-1.0, 1.0, "less", "invalid"),
        (1.0, -1.0, "less", "improved"),
        (1.0, -1.0, "more", "regressed"),
    ],
)
def test_values_without_uncertainty_are_compared_as_they_are(
    base: float, head: float, better: Any, verdict: str
) -> None:
    assert compare_values(Value(base), Value(head), RULE, better).verdict == verdict


def test_an_uncertainty_widens_the_limits() -> None:
    """+10 % with a standard uncertainty of 1 % is certain, and with one of 8 % it is not."""
    sure = compare_values(Value(2.0, 0.02), Value(2.2, 0.0), RULE, "less")
    assert sure.verdict == "regressed"
    assert (sure.low, sure.high) == pytest.approx((1.1 - 1.645 * 0.01, 1.1 + 1.645 * 0.01), abs=1e-4)
    for base_u, head_u in ((0.16, 0.0), (0.0, 0.16)):
        unsure = compare_values(Value(2.0, base_u), Value(2.2, head_u), RULE, "less")
        assert unsure.verdict == "inconclusive"


@pytest.mark.parametrize("better", ["less", "more"])
def test_too_near_zero_a_relative_threshold_asks_for_an_absolute_one(better: Any) -> None:
    """The sign of a rounding error does not matter, and a threshold as in the example decides."""
    near = (0.0, 1e-12, -1e-12, 1.0)
    for base, head in itertools.product(near, near):
        found = compare_values(Value(base, 0.5), Value(head, 0.5), RULE, better)
        assert (found.verdict, found.ratio, found.high) == ("inconclusive", None, None)
        start, example = found.reason.split("; add an absolute threshold, such as ")
        assert start.endswith(", known to 1.16: too near zero for a relative threshold")
        rule = parse_threshold("wer", example).rule()
        assert compare_values(Value(base, 0.5), Value(head, 0.5), rule, better).verdict == "unchanged"
    assert compare_values(Value(0.0, 0.5), Value(0.0, 0.5), RULE, better).reason.endswith(" 5%+2")


def test_negative_values_ask_for_an_absolute_threshold_of_their_size() -> None:
    found = compare_values(Value(-2.0, 0.01), Value(-1.0, 0.01), RULE, "less")
    assert found.verdict == "invalid"
    assert found.reason == (
        "values below zero have no relative change; add an absolute threshold, such as 5%+0.1"
    )
    rule = Rule(threshold=0.05, threshold_absolute=0.1)
    found = compare_values(Value(2.0), Value(-1.0), rule, "less")
    assert (found.verdict, found.reason, found.ratio) == ("improved", "from 2 to -1, known to 0", None)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_a_value_that_may_be_zero(form: Format) -> None:
    base, head = (report_of(with_wer(each, uncertainty=each / 2)) for each in (0.2, 0.1))
    compared = compare_reports(base, head, ("base", "head"), [Criterion("wer", RULE, gated=True)])
    text = render_comparison(ComparisonResult(compared, (base, head)), form)
    assert "inconclusive" in text
    assert "-142" not in text


def test_values_of_the_same_items_are_compared_in_pairs() -> None:
    """Prompts differ a lot and the head is better by 0.1 at each: only pairs show it."""
    items = [0.1, 0.9, 0.3, 0.7, 0.5]
    better = [each + 0.1 + 0.001 * place for place, each in enumerate(items)]
    base, head = Value(0.5, 0.14, items), Value(0.602, 0.14, better)
    assert compare_values(base, head, RULE, "more").verdict == "improved"
    assert compare_values(base, Value(0.602, 0.14, better[1:]), RULE, "more").verdict == "inconclusive"
    alike = compare_values(Value(2.0, 1.1, [1, 2, 3]), Value(3.0, 1.1, [2, 3, 4]), RULE, "more")
    assert (alike.verdict, alike.reason) == ("improved", "+50.0%, with the same difference in every pair")


@pytest.mark.parametrize(("head", "verdict"), [(-3.0, "improved"), (-1.05, "unchanged"), (1.0, "regressed")])
def test_an_absolute_threshold_decides_where_there_is_no_ratio(head: float, verdict: str) -> None:
    rule = Rule(threshold=0.05, threshold_absolute=0.1)
    assert compare_values(Value(-1.0), Value(head), rule, "less").verdict == verdict


def with_wer(value: float | list[float] | None, *, name: str = TEST, **how: Any) -> Record:
    made = record_of(name)
    return made if value is None else add_metric(made, "wer", value, **{"better": "less", **how})


def one(base: Record, head: Record) -> Comparison:
    criterion = Criterion("wer", RULE, gated=True)
    (found,) = compare_reports(report_of(base), report_of(head), ("base", "head"), [criterion]).comparisons
    return found


def test_a_comparison_of_records_has_values_unit_and_direction() -> None:
    found = one(with_wer(0.2, unit="err"), with_wer(0.3, unit="err"))
    assert (found.verdict, found.base, found.head, found.unit) == ("regressed", 0.2, 0.3, "err")
    assert (found.better, found.kind, found.gated) == ("less", None, True)
    assert found.ratio == pytest.approx(1.5)
    assert found.reason == "+50.0%, from values without an uncertainty"


@pytest.mark.parametrize(
    ("base", "head", "verdict", "reason"),
    [
        (with_wer(None), with_wer(0.2), "new", "the baseline has no wer"),
        (with_wer(0.2), with_wer(None), "invalid", "head has no wer"),
        (with_wer(None), with_wer(None), "no value", "neither side has wer"),
        (with_wer(0.2, unit="%"), with_wer(0.2), "invalid", "head has wer in no unit, expected %"),
        (
            with_wer(0.2, better="more"),
            with_wer(0.2),
            "not comparable",
            "wer: the sides disagree on which direction is better",
        ),
    ],
)
def test_every_reason_for_no_verdict(base: Record, head: Record, verdict: str, reason: str) -> None:
    found = one(base, head)
    assert (found.verdict, found.reason) == (verdict, reason)


@pytest.mark.parametrize(
    ("base", "head", "verdict", "code"), [(-2.0, -1.0, "improved", 0), (-1.0, -2.0, "regressed", 1)]
)
def test_a_gate_decides_between_negative_values(base: float, head: float, verdict: str, code: int) -> None:
    """Such as log-likelihoods, of which more is better."""
    criterion = Criterion("wer", Rule(threshold=0.03, threshold_absolute=0.1), gated=True)
    sides = [report_of(with_wer(each, better="more", uncertainty=0.01)) for each in (base, head)]
    compared = compare_reports(sides[0], sides[1], ("base", "head"), [criterion])
    (found,) = compared.comparisons
    assert (found.verdict, exit_code(compared)) == (verdict, code)
    assert list_void_gates([found]) == []


@pytest.mark.parametrize(
    ("value", "how"),
    [(0, {}), (-0.5, {}), (0.0, {"uncertainty": 0.5}), (1e-12, {"uncertainty": 0.5}), ([0, 0], {})],
)
def test_a_gate_passes_a_perfect_zero(value: Any, how: dict[str, Any]) -> None:
    """Such as a number of wrong answers: the threshold is above every value, and decides."""
    criterion = Criterion("wer", Rule(threshold=0.05, threshold_absolute=2.0), gated=True)
    base, head = (report_of(with_wer(value, **how)) for _ in range(2))
    compared = compare_reports(base, head, ("base", "head"), [criterion])
    assert [each.verdict for each in compared.comparisons] == ["unchanged"]
    assert (exit_code(compared), list_void_gates(compared.comparisons)) == (0, [])
    worse = report_of(with_wer(3, uncertainty=0.1))
    assert exit_code(compare_reports(base, worse, ("base", "head"), [criterion])) == 1


def test_a_metric_that_a_session_lacks_is_not_new() -> None:
    """The head would be 4.5 times worse."""
    from_sessions = []
    for values in ((0.2, 0.2, None, 0.2), (0.9,) * 4):
        side = SideSessions()
        for number, value in enumerate(values, 1):
            side.add(number, report_of(with_wer(value)))
        from_sessions.append(side.join().records[0])
    found = one(*from_sessions)
    assert (found.verdict, found.reason) == ("invalid", "base has no wer: 1 of 4 sessions has no wer")
    found = one(*reversed(from_sessions))
    assert (found.verdict, found.reason) == ("invalid", "head has no wer: 1 of 4 sessions has no wer")
