# SPDX-License-Identifier: Apache-2.0
"""Run and LoadRun: results of the fixture ``energy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.measure.metrics import is_prefill_only
from pytest_llenergy.model.load_curve import LoadCurve, describe_max_load
from pytest_llenergy.model.quantity import format_quantity
from pytest_llenergy.model.record import Metric, Round

#: Metrics that ``repr(run)`` shows if the work has them.
METRICS_OF_REPR = ("energy_j", "energy_per_output_token_j", "duration_s", "output_tokens_per_s")
METRICS_OF_PREFILL = ("energy_j", "energy_per_input_token_j", "duration_s")

#: Why a run or a window has no energy, and why a test that asks for it is skipped from there on.
DISABLED = "--energy-disable: nothing was measured"


def skip_disabled() -> NoReturn:
    """Skip the rest of the test: an assertion on energy that was not measured must neither fail nor pass."""
    # ``pytest.skip`` would report this line as the location of the skip.
    raise pytest.skip.Exception(DISABLED, _use_item_location=True)


def _describe(name: str, metric: Metric) -> str:
    """Return a value with its unit, or why the joules are missing; empty for another missing metric."""
    if metric.value is None:
        return f"no joules ({metric.reason})" if name == "energy_j" else ""
    u = metric.uncertainty_absolute if "J" in metric.unit else None
    return format_quantity(metric.value, u, metric.unit)


@dataclass(frozen=True, repr=False)
class Run:
    """Result of ``energy``. Every metric is an attribute too, such as ``run.energy_per_output_token_j``.

    ``run.energy_j`` and ``run.duration_s`` are those of one call, whereas ``run.rounds[0].energy_j`` is the
    energy of all ``run.rounds[0].iterations`` calls of a round, as are its duration and tokens.

    Attributes:
        rounds: Each measured round, with its energy in joules and its duration in seconds.
        metrics: Each metric by name, with unit, standard uncertainty and number of rounds. Names end in
            their unit.
        result: What the last measured call returned; with several ranks a list of their results.
    """

    rounds: list[Round]
    metrics: dict[str, Metric]
    result: Any

    def __repr__(self) -> str:
        names = METRICS_OF_PREFILL if is_prefill_only(self.rounds) else METRICS_OF_REPR
        shown = [_describe(name, self.metrics[name]) for name in names if name in self.metrics]
        rounds = f"{len(self.rounds)} round{'' if len(self.rounds) == 1 else 's'}"
        kinds = {domain.kind for each in self.rounds for domain in each.by_domain.values()}
        parts = [
            *filter(None, shown),
            *(f"joules {kind}" for kind in ("attributed", "estimated") if kind in kinds),
        ]
        return f"<Run of {rounds}: {', '.join(parts)}>"

    def __getattr__(self, name: str) -> float:
        __tracebackhide__ = True
        metrics = self.__dict__.get("metrics", {})
        if name not in metrics:
            raise AttributeError(f"a run has no {name}; metrics: {', '.join(metrics)}")
        metric = metrics[name]
        if metric.value is None:
            raise LLEnergyError(f"{name} has no value: {metric.reason}")
        return float(metric.value)


@dataclass(frozen=True, repr=False)
class LoadRun(Run):
    """Result of ``energy.load_curve`` and ``energy.max_load``: a ``Run`` of one of the loads.

    Attributes:
        curve: The points, and the result of the search.
    """

    curve: LoadCurve

    def __repr__(self) -> str:
        count = len(self.curve.points)
        found = "" if self.curve.between is None else f", {describe_max_load(self.curve)}"
        return f"<LoadRun of {count} load{'' if count == 1 else 's'}{found}; {super().__repr__()[1:-1]}>"


class DisabledMetrics(dict[str, Metric]):
    """The metrics of a run with ``--energy-disable``: to look one up skips the rest of the test."""

    def __missing__(self, name: str) -> NoReturn:
        skip_disabled()


class DisabledRun(LoadRun):
    """Result of a measuring call with ``--energy-disable``: what the call returned, and no rounds."""

    def __init__(self, result: Any) -> None:
        # Without ``curve``, which is then looked up as a metric is.
        vars(self).update(rounds=[], metrics=DisabledMetrics(), result=result)

    def __repr__(self) -> str:
        return f"<Run: {DISABLED}>"

    def __getattr__(self, name: str) -> NoReturn:
        # Not for what Python looks up itself, as to copy an object.
        if name.startswith("_"):
            raise AttributeError(name)
        skip_disabled()
