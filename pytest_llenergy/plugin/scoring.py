# SPDX-License-Identifier: Apache-2.0
"""Score outputs against references: accuracy, and accuracy per joule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.custom_metrics import ACCURACY, PER_JOULE, as_number, listed, make_metric, show
from pytest_llenergy.record.metrics import scale_metric
from pytest_llenergy.record.record import CustomMetric, Metric

#: Scores one output against one reference, of any type, from 0 (wrong) to 1 (right).
Scorer = Callable[[str, Any], float]


def exact_match(output: str, reference: object) -> float:
    """Return 1 if an output is the text of a reference, apart from white space around it, otherwise 0."""
    return float(output.strip() == str(reference).strip())


def score_outputs(outputs: Sequence[str], references: Iterable[object], scorer: Scorer | str) -> list[float]:
    """Return the score of each output; of a list or tuple of references for an output, the best counts.

    Raises:
        LLEnergyError: There are more or fewer references than outputs, none for an output, or no such scorer.
    """
    if not callable(scorer) and scorer != "exact_match":
        raise LLEnergyError(f'score: scorer is {scorer!r}, needs a function or "exact_match"')
    score = scorer if callable(scorer) else exact_match
    found = []
    for place, (output, each) in enumerate(zip(outputs, _listed_for(outputs, references), strict=True)):
        choices = each if isinstance(each, list | tuple) else [each]
        if not choices:
            raise LLEnergyError(f"score: output {place} has no reference; give at least one for each")
        found.append(max(score(output, choice) for choice in choices))
    return found


def _listed_for(outputs: Sequence[str], references: object) -> list[object]:
    """Return references as a list, of which each output must have one."""
    given = listed(references)
    if given is None:
        raise LLEnergyError(f"references: {show(references)} is no list; give one for each output")
    if len(given) != len(outputs):
        raise LLEnergyError(f"references: {len(given)} for {len(outputs)} outputs; give one for each")
    return given


def _score(value: object) -> float:
    number = as_number(value)
    if not 0 <= number <= 1:
        raise LLEnergyError(f"score: {show(value)} is not a number from 0 to 1")
    return number


def accuracy_metrics(
    scores: Sequence[float], energy: Metric | None
) -> dict[str, tuple[Metric, CustomMetric]]:
    """Return accuracy, the mean score, and accuracy per joule, if the joules of an iteration are known.

    The uncertainty is that of the choice of items: binomial for scores of 0 and 1, otherwise from their
    scatter.

    Args:
        scores: The score of each output, from 0 to 1.
        energy: The energy of an iteration (J).

    Raises:
        LLEnergyError: A score is not a number from 0 to 1, or no score was given.
    """
    if not scores:
        raise LLEnergyError("score: no outputs to score")
    values = list(map(_score, scores))
    metric, custom = make_metric(ACCURACY, values, unit="1", better="more")
    assert metric.value is not None
    u = _item_uncertainty(values)
    accuracy = _with_uncertainty(metric, u)
    found = {ACCURACY: (accuracy, custom)}
    if energy is None or not energy.value or energy.value <= 0:
        return found
    per_joule = scale_metric(accuracy, 1 / energy.value, "1/J", None)
    relative = math.hypot(
        u / metric.value if metric.value else 0.0, (energy.uncertainty_absolute or 0.0) / energy.value
    )
    assert per_joule.value is not None
    combined = per_joule.value * relative if metric.value else u / energy.value
    found[PER_JOULE] = _with_uncertainty(per_joule, combined), CustomMetric(better="more")
    return found


def _with_uncertainty(metric: Metric, u: float) -> Metric:
    return Metric(value=metric.value, unit=metric.unit, uncertainty=u, uncertainty_absolute=u, n=metric.n)


def _item_uncertainty(scores: Sequence[float]) -> float:
    """Return the standard uncertainty of a mean score over other items of the same kind.

    For a proportion, the standard deviation of Jeffreys' posterior (Brown, Cai and DasGupta, "Interval
    estimation for a binomial proportion", 2001), which is not zero where all items are right, or none.
    """
    n = len(scores)
    if all(each in (0, 1) for each in scores):
        right, wrong = sum(scores) + 0.5, n - sum(scores) + 0.5
        return math.sqrt(right * wrong / (n + 1) ** 2 / (n + 2))
    return stdev(scores) / math.sqrt(n) if n > 1 else max(fmean(scores), 1 - fmean(scores))
