# SPDX-License-Identifier: Apache-2.0
"""Custom metrics: their names, and their values with uncertainties."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.custom_metrics import (
    MAX_VALUES,
    add_metric,
    is_custom_name,
    join_custom,
    make_metric,
)
from pytest_llenergy.record.defaults import FACT_COLUMNS
from pytest_llenergy.record.metrics import METRIC_NAMES
from pytest_llenergy.record.record import CustomMetric, Metric
from pytest_llenergy.report.columns import COLUMNS

from .reports import RECORD


def test_a_single_value_has_the_uncertainty_that_it_was_given() -> None:
    plain, custom = make_metric("loss", 2.5, better="less")
    assert plain == Metric(value=2.5, unit="", n=1)
    assert custom == CustomMetric(better="less")
    known, _ = make_metric("loss", 2.5, unit="nat", better="less", uncertainty=0.1)
    assert (known.uncertainty, known.uncertainty_absolute, known.unit) == (0.1, 0.1, "nat")


def test_several_values_have_a_mean_and_its_uncertainty() -> None:
    metric, custom = make_metric("overlap", (0.7, 0.8, 0.9), better="more")
    # Half of Student's t for 95.45 % with two degrees of freedom is 2.265.
    assert metric.value == pytest.approx(0.8)
    assert metric.n == 3
    assert metric.uncertainty == pytest.approx(0.1 / math.sqrt(3) * 2.265)
    assert custom.values == [0.7, 0.8, 0.9]
    many, kept = make_metric("overlap", [0.5] * (MAX_VALUES + 1), better="more")
    assert (many.n, kept.values) == (MAX_VALUES + 1, [])


def test_no_name_means_two_things_in_an_option() -> None:
    assert [name for name in COLUMNS if is_custom_name(name)] == []
    assert {*FACT_COLUMNS} == {*COLUMNS} - {*METRIC_NAMES}


@pytest.mark.parametrize(
    "name", ["accuracy", "wer", "rouge_l", "tokens_saved", "precision", "Perplexity", "bleu4"]
)
def test_usual_names_are_free(name: str) -> None:
    assert is_custom_name(name)
    make_metric(name, 1, better="less")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            (name, "the name is built in; choose another one")
            for name in ("energy_j", "duration_s", "test", "backend", "types")
        ),
        ("prefil_energy_j", "too similar to the built-in prefill_energy_j; choose another name"),
        *(
            (name, "a name has letters, digits and _, up to 80, a letter first")
            for name in ("", "9lives", "a b", "a,b", "a:b", "é", "x" * 81)
        ),
    ],
)
def test_a_name_that_options_could_not_use_is_refused(name: str, why: str) -> None:
    assert not is_custom_name(name)
    with pytest.raises(LLEnergyError) as caught:
        make_metric(name, 1, better="less")
    assert str(caught.value) == f"metric {name!r}: {why}"


def test_no_built_in_name_is_free() -> None:
    assert [name for name in METRIC_NAMES if is_custom_name(name)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"better": "higher"}, 'better is \'higher\', needs "less" or "more"'),
        ({"value": math.nan}, "nan is not a finite number"),
        ({"value": "0.5"}, "'0.5' is not a finite number"),
        ({"value": [1, None]}, "None is not a finite number"),
        ({"value": []}, "no values given"),
        ({"value": ["x" * 99]}, f"'{'x' * 29}…{'x' * 28}' is not a finite number"),
        ({"uncertainty": -1}, "uncertainty is -1, needs 0 or more"),
        ({"uncertainty": math.nan}, "uncertainty nan is not a finite number"),
        ({"value": [1, 2], "uncertainty": 0.1}, "the uncertainty of 2 values comes from their scatter"),
        ({"unit": "x" * 25}, f"unit is {'x' * 25!r}, needs a short text, such as ms"),
        ({"unit": "a\nb"}, "unit is 'a\\nb', needs a short text, such as ms"),
    ],
)
def test_invalid_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LLEnergyError) as caught:
        make_metric("loss", **{"value": 1.0, "better": "less", **arguments})
    assert str(caught.value) == f"metric loss: {message}"


@pytest.mark.filterwarnings("error")
def test_tensors_and_arrays_are_values() -> None:
    """A loss is a tensor of no dimension, and torch may still differentiate it."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    loss = torch.tensor(2.25, requires_grad=True)
    for value in (loss, loss.detach(), numpy.array(2.25), numpy.float32(2.25)):
        metric, custom = make_metric("loss", value, better="less", uncertainty=torch.tensor(0.5))
        assert (metric.value, metric.uncertainty, custom.values) == (2.25, 0.5, [])
    for values in (torch.tensor([1.0, 2.0]), numpy.array([1.0, 2.0])):
        assert make_metric("loss", values, better="less")[1].values == [1.0, 2.0]
    with pytest.raises(LLEnergyError, match=r"^metric loss: tensor\(\[1\., 1\.\]\) is not a finite number$"):
        make_metric("loss", torch.ones(2, 2), better="less")


def test_a_hook_adds_a_metric_to_a_record() -> None:
    record = add_metric(RECORD, "loss", 2.5, unit="nat", better="less")
    assert record.value_of("loss") == 2.5
    assert record.custom == {**RECORD.custom, "loss": CustomMetric(better="less")}
    assert RECORD.value_of("loss") is None


def test_sessions_are_the_values_of_a_joined_metric() -> None:
    sessions = [add_metric(RECORD, "loss", each, better="less") for each in (2.0, 2.2, 2.4)]
    metrics, custom = join_custom(sessions)
    assert metrics["loss"].value == pytest.approx(2.2)
    assert custom["loss"].values == [2.0, 2.2, 2.4]
    without = msgspec.structs.replace(RECORD, metrics={}, custom={})
    metrics, custom = join_custom([without, *sessions])
    assert (metrics["loss"].value, metrics["loss"].reason) == (None, "1 of 4 sessions has no loss")
    assert custom["loss"] == CustomMetric(better="less")
    other = add_metric(RECORD, "loss", 2.0, unit="%", better="less")
    metrics, _ = join_custom([*sessions, other])
    assert metrics["loss"].reason == "sessions have loss in % and in no unit"
    assert join_custom([without, without]) == ({}, {})
    alone = add_metric(RECORD, "loss", [1.0, 3.0], better="less")
    assert join_custom([alone])[1]["loss"].values == [1.0, 3.0]
