# SPDX-License-Identifier: Apache-2.0
"""A saving whose outputs changed is no improvement."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import msgspec
import pytest

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.rule import DEFAULT_RULE
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.custom_metrics import make_metric
from pytest_llenergy.record.outputs import digest_outputs
from pytest_llenergy.record.record import BackendInfo, Record

from .runs import record_of, report_of, scaled

PROMPTS = ["Name three rivers."]
TOKENS = list(range(100, 140))

BACKEND = BackendInfo(
    name="tiny", version="1", model="m", task="generate", generation={"do_sample": False}, prompts_digest="p"
)


def generated(tokens: list[int] | None, factor: float = 1.0, **changes: Any) -> Record:
    outputs = [] if tokens is None else digest_outputs(PROMPTS, [tokens])
    return record_of(joules=scaled(factor), **{"backend": BACKEND, "outputs": outputs, **changes})


def scored(record: Record, *scores: float) -> Record:
    energy_j = record.metrics["energy_j"].value
    assert energy_j is not None
    found = {
        "accuracy": make_metric("accuracy", scores, unit="1", better="more"),
        "accuracy_per_joule": make_metric(
            "accuracy_per_joule", fmean(scores) / energy_j, unit="1/J", better="more", uncertainty=0.001
        ),
    }
    metrics = {**record.metrics, **{name: metric for name, (metric, _) in found.items()}}
    return msgspec.structs.replace(
        record, metrics=metrics, custom={n: each for n, (_, each) in found.items()}
    )


def one(base: Record, head: Record, metric: str = "energy_j", **how: Any) -> Comparison:
    asked = [Criterion(metric, DEFAULT_RULE, gated=True)]
    (found,) = compare_reports(report_of(base), report_of(head), ("b", "h"), asked, **how).comparisons
    return found


CHANGED = [*TOKENS[:16], *range(500, 524)]  # 16 of 40 tokens agree


def test_a_saving_with_the_same_outputs_is_an_improvement() -> None:
    found = one(generated(TOKENS), generated(TOKENS, 0.8))
    assert (found.verdict, found.notes) == ("improved", [])


@pytest.mark.parametrize("across", [False, True])
def test_a_saving_with_other_outputs_is_not(across: bool) -> None:
    found = one(generated(TOKENS), generated(CHANGED, 0.8), across=across)
    assert found.verdict == "not comparable"
    assert found.reason.startswith("outputs differ: agreement 0.40 < 0.95, so it is no improvement (-20.0%")
    assert found.differences == ["outputs differ: agreement 0.40 < 0.95"]
    # The reason stands once, and names what accepts it.
    assert found.reason.endswith("; a new baseline accepts it")
    assert not any(note.startswith("outputs differ") for note in found.notes)
    # What was measured stays in the report.
    assert found.ratio == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "regressed"), (1.0, "unchanged")])
def test_other_outputs_are_noted_beside_other_verdicts(factor: float, verdict: str) -> None:
    found = one(generated(TOKENS), generated(CHANGED, factor))
    assert (found.verdict, found.notes) == (verdict, ["outputs differ: agreement 0.40 < 0.95"])


@pytest.mark.parametrize(("same", "verdict"), [(950, "improved"), (949, "not comparable")])
def test_95_percent_of_the_tokens_must_agree(same: int, verdict: str) -> None:
    head = [*range(same), *range(5000, 6000 - same)]
    assert one(generated([*range(1000)]), generated(head, 0.8)).verdict == verdict


def test_scores_decide_if_both_sides_have_them() -> None:
    good, bad = [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]
    base, other = scored(generated(TOKENS), *good), generated(CHANGED, 0.8)
    found = one(base, scored(other, *good))
    assert (found.verdict, found.notes) == ("improved", [])
    assert one(base, scored(generated(TOKENS, 0.8), *good)).notes == []
    found = one(base, scored(generated(TOKENS, 0.8), *bad))
    assert found.verdict == "not comparable"
    assert found.differences == ["outputs differ: accuracy 0.4 < 0.95 × 0.8"]
    assert one(base, other).verdict == "not comparable"


def test_lost_scores_are_no_improvement_unless_tokens_agree() -> None:
    good = [1, 1, 1, 1, 0]
    found = one(scored(generated(None), *good), generated(None, 0.8))
    assert (found.verdict, found.differences) == (
        "not comparable",
        ["outputs not compared: only base has accuracy"],
    )
    found = one(scored(generated(TOKENS), *good), generated(TOKENS, 0.8))
    assert (found.verdict, found.notes) == ("improved", [])
    found = one(generated(TOKENS), scored(generated(TOKENS, 0.8), *good))
    assert (found.verdict, found.notes) == ("improved", [])


@pytest.mark.parametrize(
    ("base", "head", "note"),
    [
        (generated(None), generated(TOKENS, 0.8), "base has no tokens of outputs"),
        (generated(TOKENS), generated(None, 0.8), "head has no tokens of outputs"),
        (
            generated(None, backend=msgspec.structs.replace(BACKEND, generation={"do_sample": True})),
            generated(None, 0.8, backend=msgspec.structs.replace(BACKEND, generation={"do_sample": True})),
            "base sampled",
        ),
    ],
)
def test_where_the_guard_does_not_apply_it_is_noted(base: Record, head: Record, note: str) -> None:
    found = one(base, head)
    assert (found.verdict, found.notes) == ("improved", [f"outputs not compared: {note}"])


WRONG, RIGHT = [1] * 500 + [0] * 500, [1] * 800 + [0] * 200


def test_accuracy_per_joule_is_guarded_like_joules() -> None:
    """Half of the energy makes up for lost accuracy in the ratio, but not for the user."""
    base = scored(generated(TOKENS), *RIGHT)
    worse, as_good = (scored(generated(CHANGED, 0.5), *scores) for scores in (WRONG, RIGHT))
    found = one(base, worse, metric="accuracy_per_joule")
    assert found.verdict == "not comparable"
    assert found.differences == ["outputs differ: accuracy 0.5 < 0.95 × 0.8"]
    assert one(base, as_good, metric="accuracy_per_joule").verdict == "improved"
