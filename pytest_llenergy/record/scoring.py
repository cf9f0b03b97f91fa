# SPDX-License-Identifier: Apache-2.0
"""Score outputs against references: accuracy, and accuracy per joule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.custom_metrics import as_number, listed, make_metric, show
from pytest_llenergy.record.metrics import scale_metric
from pytest_llenergy.record.record import CustomMetric, Metric

#: Names of the metrics.
ACCURACY, PER_JOULE = "accuracy", "accuracy_per_joule"

#: Scores one output against one reference, of any type, from 0 (wrong) to 1 (right).
Scorer = Callable[[str, Any], float]


def exact_match(output: str, reference: object) -> float:
    """Return 1 if an output is the text of a reference, apart from white space around it, otherwise 0."""
    return float(output.strip() == str(reference).strip())


def find_scorer(scorer: Scorer | str) -> Scorer:
    """Return a scorer: a function, or ``"exact_match"``; otherwise raise ``LLEnergyError``."""
    if callable(scorer):
        return scorer
    if scorer == "exact_match":
        return exact_match
    raise LLEnergyError(f'score: scorer is {scorer!r}, needs a function or "exact_match"')


def score_outputs(outputs: Sequence[str], references: Iterable[object], scorer: Scorer | str) -> list[float]:
    """Return the score of each output; of a list or tuple of references for an output, the best counts.

    Raises:
        LLEnergyError: There are more or fewer references than outputs, none for an output, or no such scorer.
    """
    given = listed(references)
    if given is None and not isinstance(references, str):
        raise LLEnergyError(f"score: references is {show(references)}, needs a list with one for each output")
    if given is None or len(given) != len(outputs):
        raise LLEnergyError(
            f"score: {_count(given, 'reference')} for {len(outputs)} outputs; give one for each"
        )
    score = find_scorer(scorer)
    choices = [each if isinstance(each, list | tuple) else [each] for each in given]
    for place, choice in enumerate(choices):
        if not choice:
            raise LLEnergyError(f"score: output {place} has no reference; give at least one for each")
    return [
        max(score(output, each) for each in choice) for output, choice in zip(outputs, choices, strict=True)
    ]


def check_scores(scores: object, outputs: Sequence[str] | None) -> list[float]:
    """Return what a hook gave as scores, as a list.

    Args:
        scores: The scores, in any iterable.
        outputs: The outputs, each of which must have one; None if the measured call returned no texts.

    Raises:
        LLEnergyError: They are no list of scores, or there are more or fewer than outputs.
    """
    hook, given = "pytest_llenergy_score", listed(scores)
    if given is None:
        raise LLEnergyError(f"{hook} returned {show(scores)}, needs a list with a score for each output")
    if outputs is not None and len(given) != len(outputs):
        raise LLEnergyError(
            f"{hook}: {_count(given, 'score')} for {len(outputs)} outputs; return one for each"
        )
    return [_score(each) for each in given]


def _count(given: Sequence[object] | None, noun: str) -> str:
    count = 1 if given is None else len(given)
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _score(value: object) -> float:
    try:
        number = as_number(value)
    except OverflowError:
        number = math.inf
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
