# SPDX-License-Identifier: Apache-2.0
"""Scores of outputs: accuracy with its uncertainty, and accuracy per joule."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.plugin.scoring import accuracy_metrics, exact_match, score_outputs
from pytest_llenergy.record.record import Metric

ENERGY = Metric(value=4.0, unit="J", uncertainty=0.2, uncertainty_absolute=0.4, n=6)


def test_exact_match_ignores_white_space_around_both() -> None:
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42", "43") == 0.0
    assert exact_match("Paris", "paris") == 0.0


def test_the_best_of_several_references_counts() -> None:
    assert score_outputs(["two", "4"], [["2", "two"], "3"], "exact_match") == [1.0, 0.0]
    assert score_outputs(["two"], [("2", "two")], "exact_match") == [1.0]
    assert score_outputs(["The answer is 4"], ["4"], lambda text, ref: float(ref in text)) == [1.0]


def test_a_reference_may_be_of_any_type() -> None:
    assert score_outputs(["4", "7"], [4, 6], lambda text, number: float(int(text) == number)) == [1.0, 0.0]
    assert score_outputs(["4", "7"], [4, (6, 7)], "exact_match") == [1.0, 1.0]
    assert score_outputs(["a"], [{"answer": "a"}], lambda text, row: float(text == row["answer"])) == [1.0]


def test_accuracy_has_a_binomial_uncertainty() -> None:
    """Jeffreys' posterior for 8 of 10: Beta(8.5, 2.5)."""
    metric, custom = accuracy_metrics([1] * 8 + [0] * 2, ENERGY)["accuracy"]
    u = math.sqrt(8.5 * 2.5 / (11**2 * 12))
    assert metric.value == pytest.approx(0.8)
    assert (metric.unit, metric.n) == ("1", 10)
    assert metric.uncertainty == metric.uncertainty_absolute == pytest.approx(u)
    assert (custom.better, custom.values) == ("more", [1.0] * 8 + [0.0] * 2)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_perfect_score_of_few_items_is_not_certain(score: float) -> None:
    metric, _ = accuracy_metrics([score] * 3, ENERGY)["accuracy"]
    assert metric.uncertainty is not None
    assert 0.1 < metric.uncertainty < 0.3


def test_accuracy_per_joule_has_both_uncertainties() -> None:
    found = accuracy_metrics([1, 1, 1, 0], ENERGY)
    accuracy, per_joule = found["accuracy"][0], found["accuracy_per_joule"][0]
    assert accuracy.value == 0.75
    assert per_joule.value == pytest.approx(0.75 / 4)
    assert per_joule.unit == "1/J"
    assert accuracy.uncertainty is not None
    relative = math.hypot(accuracy.uncertainty / 0.75, 0.1)
    assert per_joule.uncertainty == pytest.approx(0.75 / 4 * relative)


def test_without_joules_there_is_only_accuracy() -> None:
    assert set(accuracy_metrics([1, 0], None)) == {"accuracy"}
    assert set(accuracy_metrics([1, 0], Metric(value=None, unit="J", reason="no meter"))) == {"accuracy"}


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([1.1], "1.1"),
        ([-0.1], "-0.1"),
        (["1"], "'1'"),
        ([math.nan], "nan"),
        ([1, None], "None"),
        ([10**400], f"{10**29}…{'0' * 29}"),
    ],
)
def test_scores_outside_0_to_1_are_refused(scores: list[Any], shown: str) -> None:
    with pytest.raises(LLEnergyError) as caught:
        accuracy_metrics(scores, None)
    assert str(caught.value) == f"score: {shown} is not a number from 0 to 1"


def test_references_may_come_from_any_iterable() -> None:
    assert score_outputs(["a", "b"], iter(["a", "c"]), "exact_match") == [1.0, 0.0]
    assert score_outputs(["1", "2"], array("i", [1, 3]), "exact_match") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("references", "scorer", "message"),
    [
        (["a"], "exact_match", "references: 1 for 2 outputs; give one for each"),
        (iter("abc"), "exact_match", "references: 3 for 2 outputs; give one for each"),
        ("ab", "exact_match", "references: 'ab' is no list; give one for each output"),
        (None, "exact_match", "references: None is no list; give one for each output"),
        ([[], ["6"]], "exact_match", "score: output 0 has no reference; give at least one for each"),
        (["a", ()], "exact_match", "score: output 1 has no reference; give at least one for each"),
        (["a", "b"], "bleu", "score: scorer is 'bleu', needs a function or \"exact_match\""),
    ],
)
def test_what_cannot_be_scored_is_one_line(references: Any, scorer: str, message: str) -> None:
    with pytest.raises(LLEnergyError) as caught:
        score_outputs(["a", "b"], references, scorer)
    assert str(caught.value) == message
