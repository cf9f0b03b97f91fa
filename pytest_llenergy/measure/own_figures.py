# SPDX-License-Identifier: Apache-2.0
"""The figures of rounds that the measured code chose itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from pytest_llenergy.measure.metrics import FIGURES, is_valid, summarise, values_of
from pytest_llenergy.measure.own_rounds import Stretch, far_apart
from pytest_llenergy.meters.windows import RESOLVABLE
from pytest_llenergy.model.record import Flag, Metric, Round


def figures(rounds: Sequence[Round], found: Sequence[Stretch], coverage: float = 1.0) -> dict[str, Metric]:
    """Every figure, of all iterations alike: stretches have more or fewer of them.

    What the meters cannot know counts in full where rounds are far apart: nobody shuffles when they start, so
    they may all fall into the same part of a tick, and are then all wrong by the same. What is wrong at an
    edge that two stretches share is too much in one and too little in the other.
    """
    metrics = {
        name: _of_all(name, metric, rounds) for name, metric in summarise(rounds, None, coverage).items()
    }
    if not far_apart(found):
        return metrics
    return {name: _in_full(name, metric, rounds) for name, metric in metrics.items()}


def _of_all(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.value is None or name not in FIGURES:
        return metric
    figure = FIGURES[name]
    weighted = [
        (value.value, round_.duration_s if figure.unit == "W" else round_.iterations)
        for round_ in rounds
        if is_valid(round_) and (value := figure.of(round_)) is not None
    ]
    total = sum(weight for _, weight in weighted)
    mean = sum(value * weight for value, weight in weighted) / total if total else metric.value
    return msgspec.structs.replace(metric, value=mean)


def resolved(rounds: Sequence[Round], found: Sequence[Stretch]) -> list[Round]:
    """As they are, or none with joules where all together drown in what is not known.

    To leave out single ones would leave out those that happened to come out too low.
    """
    known = [each for each in rounds if each.energy_j is not None and each.energy_u_j is not None]
    if not known:
        return list(rounds)
    u_j = math.sqrt(fmean((each.energy_u_j or 0.0) ** 2 for each in known))
    if not far_apart(found):
        u_j /= math.sqrt(len(known))
    if u_j <= RESOLVABLE * fmean(each.energy_j or 0.0 for each in known):
        return list(rounds)
    reason = (
        f"not resolvable: {len(known)} windows of {fmean(each.duration_s for each in known) * 1e3:.3g} ms"
    )
    flag = Flag(name="unmeasured", severity="warning", detail=reason)
    return [
        msgspec.structs.replace(
            each,
            energy_j=None,
            energy_u_j=None,
            energy_u_absolute_j=None,
            terms=None,
            reason=each.reason or reason,
            flags=[flag, *(other for other in each.flags if other.name != "imprecise")],
        )
        for each in rounds
    ]


def _in_full(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.uncertainty is None or metric.uncertainty_absolute is None or name not in FIGURES:
        return metric
    values, _ = values_of(name, rounds)
    in_full = max(metric.uncertainty, math.sqrt(fmean(each.meter**2 for each in values)))
    own = math.sqrt(max(0.0, metric.uncertainty_absolute**2 - metric.uncertainty**2))
    return msgspec.structs.replace(metric, uncertainty=in_full, uncertainty_absolute=math.hypot(in_full, own))
