# SPDX-License-Identifier: Apache-2.0
"""A threshold as a person writes it: ``energy_j:3%``, ``energy_per_output_token_j:2.5%+0.1J``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

from pytest_llenergy.compare.metrics import METRICS, PREFIXES, Direction
from pytest_llenergy.compare.statistics import COMMON, Rule
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.metrics import FIGURES

#: A plain decimal number, without a sign: ``3``, ``2.5``, ``.5``, ``1e-3``.
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


#: A change that no gate needs to allow: ten times as much more.
LARGEST = 10.0


@dataclass(frozen=True)
class Threshold:
    """From when on ``metric`` counts as changed: by ``relative``, and by ``absolute`` in its base unit."""

    metric: str
    relative: float
    absolute: float
    text: str

    @property
    def better(self) -> Direction:
        """Which way the metric is better."""
        return METRICS[self.metric].better

    def rule(self, common: Rule = COMMON) -> Rule:
        """``common`` with this threshold.

        A tolerance below the threshold is raised to it: otherwise what lies between the two could never be
        told, by however many rounds.
        """
        return replace(
            common,
            threshold=self.relative,
            threshold_absolute=self.absolute,
            tolerance=max(common.tolerance, self.relative),
        )


def with_floor(floor: float) -> Rule:
    """The common rule where changes up to ``floor`` have no reason, as two runs of the same code show.

    A threshold or tolerance below the floor is raised to it: what lies between could never be told.
    """
    return replace(
        COMMON,
        floor=floor,
        threshold=max(COMMON.threshold, floor),
        tolerance=max(COMMON.tolerance, floor),
    )


def check_floor(thresholds: Iterable[Threshold], floor: float) -> None:
    """Raises ``PlanError`` for a threshold below the floor, which no change between the two would reach."""
    for each in thresholds:
        if each.relative < floor:
            raise PlanError(
                f"threshold {each.text!r} of {each.metric} is below the floor of {floor:.3g}: changes up "
                "to it are none; raise the one or lower the other"
            )


def parse_floor(text: str) -> Rule:
    """Read ``"1.5%"``. Raises ``PlanError`` for what is no percentage from 0 to 100."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*%\s*", text)
    floor = float(match.group(1)) / 100 if match else -1.0
    if not 0 <= floor < 1:
        raise PlanError(f"floor {text!r} is no percentage below 100%, such as '1%'")
    return with_floor(floor)


def parse_fail_on(text: str) -> Threshold:
    """Read ``METRIC:PERCENT%`` or ``METRIC:PERCENT%+QUANTITY``. Raises ``PlanError`` for what is none."""
    metric, colon, expression = str(text).partition(":")
    if not colon:
        raise PlanError(
            f"{text!r} is no METRIC:PERCENT%, such as 'energy_j:3%' or 'energy_per_output_token_j:2.5%+0.1J'"
        )
    return parse_threshold(metric.strip(), expression)


def parse_threshold(metric: str | None, text: str) -> Threshold:
    """Read ``"3%"``, ``"2.5%+0.1J"``, ``"5 % + 300 mJ"`` of ``metric`` (``energy_j``, if ``None``).

    Raises ``PlanError`` for an unknown metric, and for what is no positive percentage with, if given, a
    positive quantity in the unit of the metric.
    """
    name = "energy_j" if metric is None else metric
    if name not in METRICS:
        raise PlanError(f"unknown metric {name!r}; a gate can compare: {', '.join(FIGURES)}")
    unit = METRICS[name].unit
    written = re.escape(unit).replace("token", "tokens?")
    match = re.fullmatch(
        rf"\s*({NUMBER})\s*%\s*(?:\+\s*({NUMBER})\s*([umkMG]?){written}(?:/(?:token|request))?\s*)?",
        str(text),
    )
    relative = float(match.group(1)) / 100 if match else 0.0
    absolute = float(match.group(2)) * PREFIXES[match.group(3)] if match and match.group(2) else 0.0
    if match is None or relative <= 0 or not isfinite(absolute):
        raise PlanError(
            f"threshold {text!r} of {name} is no percentage above zero, such as '3%' or '3%+2{unit}'"
        )
    if relative > LARGEST:
        raise PlanError(f"threshold {text!r} of {name} would let everything pass; {LARGEST:.0%} is the most")
    if match.group(2) and absolute <= 0:
        raise PlanError(f"threshold {text!r} of {name} adds nothing: write '{match.group(1)}%' alone")
    return Threshold(name, relative, absolute, str(text).strip())
