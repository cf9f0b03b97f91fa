# SPDX-License-Identifier: Apache-2.0
"""Axes, and the charts that the templates draw: as wide as their box, while text keeps its size.

So the same SVG suits a phone and a desktop: places across are shares of the width, and down are pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, isfinite, log10
from typing import NamedTuple

from pytest_llenergy.record.quantity import scale_of, shown_unit

#: Class, form (of a mark by its number, or ``line``, ``dash`` or ``area``), and text of an entry of a legend.
Key = tuple[str, int | str, str]

#: Most ticks of an axis, and most named ones.
MAX_TICKS, MAX_NAMES = 6, 4


class Axis:
    """A scale of values: linear, or logarithmic if ``log`` and the values are positive and differ tenfold.

    It ends at 0 if that is the smallest value. Joules are in the step of the largest. ``names`` are shown in
    place of the numbers from 0.
    """

    def __init__(
        self, values: Iterable[float], unit: str, *, log: bool = True, names: Sequence[str] = ()
    ) -> None:
        found = [each for each in values if isfinite(each)] or [0.0, 1.0]
        power, prefix = scale_of(unit, *found)
        self.label, self.names, self._step = f"{prefix}{shown_unit(unit)}", names, 10.0**power
        low, high = min(found) / self._step, max(found) / self._step
        self.log = log and low > 0 and high / low > 10
        ends_at_zero = low == 0
        if self.log:
            low, high = log10(low), log10(high)
        room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        self.low, self.high = low if ends_at_zero else low - room, high + room

    def share(self, value: float) -> float:
        """Return the place of a value from 0 to 1, that of the nearer end if it is beyond the axis."""
        return self._share(value / self._step)

    def _share(self, value: float) -> float:
        if self.log:
            value = log10(value) if value > 0 else -inf
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and texts of a few round values, or of a few names."""
        if self.names:
            places = range(0, len(self.names), ceil(len(self.names) / MAX_NAMES))
            return [(self._share(place), self.names[place]) for place in places]
        if self.log:
            powers = range(floor(self.low), ceil(self.high) + 1)
            for mantissas in ((1, 2, 5), (1, 3), (1,)):
                values = [float(f"{each}e{power}") for power in powers for each in mantissas]
                inside = [each for each in values if each and self.low <= log10(each) <= self.high]
                if len(inside) <= MAX_TICKS:
                    break
            return [(self._share(each), f"{each:g}") for each in inside[:: ceil(len(inside) / MAX_TICKS)]]
        width = (self.high - self.low) / MAX_TICKS
        power = floor(log10(width))
        step = next(step for each in (1, 2, 5, 10) if (step := float(f"{each}e{power}")) >= width)
        form = f".{max(0, -floor(log10(step) + 1e-9))}f" if 1e-5 < step < 1e6 else ".3g"
        numbers = range(ceil(self.low / step), floor(self.high / step) + 1)
        return [(self._share(each * step), format(each * step, form)) for each in numbers]


class Mark(NamedTuple):
    """A point with the uncertainty ``u`` of ``y``, and a class of the style sheet."""

    x: float
    y: float
    tip: str
    look: str
    shape: int = 0
    u: float = 0.0
    hollow: bool = False
    name: str = ""


@dataclass
class Chart:
    """A chart with two axes.

    ``lines`` have points and a class, and may be areas. ``rules`` are vertical: class, place and name.
    """

    title: str
    x: Axis
    y: Axis
    caption: str = ""
    height: int = 200
    legend: list[Key] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    lines: list[tuple[Sequence[tuple[float, float]], str, bool]] = field(default_factory=list)
    rules: list[tuple[str, float, str]] = field(default_factory=list)


class Row(NamedTuple):
    """A row of a chart: a value with its limits, and ``band`` and ``dashes`` of the rule of a verdict."""

    name: str
    target: str
    text: str
    look: str
    tip: str
    low: float
    value: float
    high: float
    limits: str = ""
    band: tuple[float, float] | None = None
    dashes: Sequence[tuple[str, float]] = ()


class RowChart(NamedTuple):
    """A chart with a row for each test: bars from zero, or dots."""

    title: str
    rows: Sequence[Row]
    axis: Axis
    caption: str
    legend: Sequence[Key] = ()
    is_bars: bool = False
