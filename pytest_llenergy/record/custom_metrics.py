# SPDX-License-Identifier: Apache-2.0
"""Custom metrics: values with a unit and a direction that a test or a hook adds to a record.

They are in ``Record.metrics`` beside the built-in ones, so that tables and exports show both alike.
``Record.custom`` has what only they have: their direction, and single values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from statistics import fmean, stdev
from typing import get_args

import msgspec

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.base import LARGEST, Direction
from pytest_llenergy.record.defaults import FACT_COLUMNS
from pytest_llenergy.record.metrics import METRIC_NAMES
from pytest_llenergy.record.record import CustomMetric, Metric, Record
from pytest_llenergy.record.round_statistics import half_student
from pytest_llenergy.record.text import one_line, shorten

#: Names of custom metrics about the quality of outputs, which comparisons know.
ACCURACY, PER_JOULE = "accuracy", "accuracy_per_joule"

#: Names of custom metrics: they become columns, keys of JSON and arguments of options.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,79}")

#: Names that mean something else where metrics are named: other columns, the first of which names the test.
RESERVED = frozenset({"test", *FACT_COLUMNS})

#: Names that are more alike than this differ by a slip.
TOO_SIMILAR = 0.85

#: Most values that a record keeps of a custom metric; of more only the mean and its uncertainty.
MAX_VALUES = 10_000

#: Longest unit, and longest invalid value in a message (characters).
MAX_UNIT, MAX_SHOWN = 24, 60


def explain_bad_name(name: str) -> str | None:
    """Return why a custom metric cannot have a name; None if it can.

    A name that is nearly that of a built-in metric is refused, so that a slip in an option is noticed before
    anything is measured.
    """
    if name in METRIC_NAMES or name in RESERVED:
        return "the name is built in; choose another one"
    if not NAME.fullmatch(name):
        return "a name has letters, digits and _, up to 80, a letter first"
    similar = get_close_matches(name.lower(), METRIC_NAMES, n=1, cutoff=TOO_SIMILAR)
    return f"too similar to the built-in {similar[0]}; choose another name" if similar else None


def is_custom_name(name: str) -> bool:
    """Return whether a custom metric can have a name."""
    return explain_bad_name(name) is None


def make_metric(
    name: str,
    value: float | Sequence[float],
    *,
    unit: str = "",
    better: Direction,
    uncertainty: float | None = None,
    source: str | None = None,
) -> tuple[Metric, CustomMetric]:
    """Return a custom metric.

    Args:
        name: Its name.
        value: The value, or one for each round or item: the metric is then their mean, with the standard
            uncertainty of a mean.
        unit: Unit of the value.
        better: ``less`` or ``more``: the direction that is better.
        uncertainty: Standard uncertainty of a single value, in its unit; None if unknown.
        source: Where the value comes from.

    Raises:
        LLEnergyError: An argument is invalid, or a built-in metric has this name.
    """
    why = explain_bad_name(name) if isinstance(name, str) else "needs a text"
    if why is not None:
        raise LLEnergyError(f"metric {name!r}: {why}")
    if better not in get_args(Direction):
        raise LLEnergyError(f'metric {name}: better is {better!r}, needs "less" or "more"')
    if not isinstance(unit, str) or len(unit) > MAX_UNIT or unit != one_line(unit):
        raise LLEnergyError(f"metric {name}: unit is {unit!r}, needs a short text, such as ms")
    values = listed(value)
    numbers = [_number(name, each) for each in ([value] if values is None else values)]
    if not numbers:
        raise LLEnergyError(f"metric {name}: no values given")
    n = len(numbers)
    if uncertainty is not None:
        if n > 1:
            raise LLEnergyError(f"metric {name}: the uncertainty of {n} values comes from their scatter")
        uncertainty = _number(name, uncertainty, "uncertainty ")
        if uncertainty < 0:
            raise LLEnergyError(f"metric {name}: uncertainty is {uncertainty:g}, needs 0 or more")
    elif n > 1:
        uncertainty = stdev(numbers) / math.sqrt(n) * half_student(n - 1)
    metric = Metric(
        value=fmean(numbers),
        unit=unit,
        uncertainty=uncertainty,
        spread=uncertainty if n > 1 else None,
        uncertainty_absolute=uncertainty,
        n=n,
        source=source,
    )
    kept = numbers if 1 < n <= MAX_VALUES else []
    return metric, CustomMetric(better=better, values=kept)


def listed(values: object) -> list[object] | None:
    """Return the items of an iterable; None for texts and single values, such as tensors of no dimension."""
    if isinstance(values, str | bytes):
        return None
    try:
        items = iter(values)  # type: ignore[call-overload]
    except TypeError:
        return None
    return list(items)


def as_number(value: object) -> float:
    """Return a number, or a tensor that holds one, as a float; NaN for anything else."""
    if isinstance(value, str | bytes):
        return math.nan
    # torch warns of a loss that it may still differentiate.
    detach = getattr(value, "detach", None)
    try:
        return float(detach() if callable(detach) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number(name: str, value: object, argument: str = "") -> float:
    number = as_number(value)
    if not abs(number) <= LARGEST:
        raise LLEnergyError(f"metric {name}: {argument}{show(value)} is not a finite number")
    return number


def show(value: object) -> str:
    """Return a value as users wrote it, on one short line."""
    return shorten(one_line(repr(value)), MAX_SHOWN)


def add_metric(
    record: Record,
    name: str,
    value: float | Sequence[float],
    *,
    unit: str = "",
    better: Direction,
    uncertainty: float | None = None,
) -> Record:
    """Return a record with one more custom metric, for the hook ``pytest_llenergy_record``.

    Arguments and errors are those of ``energy.metric``.
    """
    metric, custom = make_metric(name, value, unit=unit, better=better, uncertainty=uncertainty)
    return msgspec.structs.replace(
        record, metrics={**record.metrics, name: metric}, custom={**record.custom, name: custom}
    )


def custom_metrics_of(records: Iterable[Record]) -> dict[str, CustomMetric]:
    """Return the custom metrics of records by name, in the order in which they appear."""
    return {name: each for record in records for name, each in record.custom.items()}


def join_custom(records: Sequence[Record]) -> tuple[dict[str, Metric], dict[str, CustomMetric]]:
    """Return the custom metrics of several sessions of one test: the mean of the values of the sessions.

    Each session is one value, in the order of the records. A metric that a session lacks has no value, but a
    reason: the mean of the others would hide why.
    """
    if len(records) == 1:
        return {name: records[0].metrics[name] for name in records[0].custom}, dict(records[0].custom)
    metrics, custom = {}, {}
    for name, each in custom_metrics_of(records).items():
        found = [record.metrics[name] for record in records if name in record.metrics]
        values = [metric.value for metric in found if metric.value is not None]
        lacking, units = len(records) - len(values), sorted({metric.unit or "no unit" for metric in found})
        if lacking or len(units) > 1:
            reason = f"{lacking} of {len(records)} sessions {'has' if lacking == 1 else 'have'} no {name}"
            if not lacking:
                reason = f"sessions have {name} in {' and in '.join(units)}"
            metrics[name] = Metric(value=None, unit=found[0].unit, reason=reason, source=found[0].source)
            custom[name] = CustomMetric(better=each.better)
        else:
            metrics[name], custom[name] = make_metric(
                name, values, unit=found[0].unit, better=each.better, source=found[0].source
            )
    return metrics, custom
