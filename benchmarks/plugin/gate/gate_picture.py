# SPDX-License-Identifier: Apache-2.0
"""Draw which verdict an estimate and its limits give: ``gate_picture.py PICTURE.svg``.

Every point is a verdict of the package's own rule; the intervals are those of rounds on the simulated
machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import BLUE, GREEN, GREY, ORANGE, RED, configure_pyplot, save_picture
from gate_world import LEVEL_J, Machine, draw_rounds, first_rounds

from pytest_llenergy.compare.rule import DEFAULT_RULE
from pytest_llenergy.compare.statistics import NOISY_ALPHA, Estimate, Sample, compare_samples

COLOURS = {
    "regressed": RED,
    "worse": ORANGE,
    "improved": GREEN,
    "unchanged": BLUE,
    "inconclusive": GREY,
}
ROUNDS = 12
#: The rule uses a smaller error rate for noisy rounds; with that rate throughout, intervals grow evenly.
NOISY_RULE = replace(DEFAULT_RULE, alpha=NOISY_ALPHA)
#: Changes of the head that are drawn (per cent), and half widths of the interval.
CHANGES, WIDTHS = (-8.0, 10.0), (0.0, 6.0)
COLUMNS, ROWS = 241, 121
#: True change of the head in each example, and the noise of its machine.
EXAMPLES = (
    *((0.06, 0.01), (0.04, 0.01), (0.03, 0.02), (0.06, 0.05)),
    *((0.02, 0.005), (0.0, 0.01), (0.0, 0.04), (-0.05, 0.01)),
)


@dataclass(frozen=True)
class Example:
    """Rounds of a simulated machine and their verdict."""

    change: float
    noise: float
    estimate: Estimate


def estimate_at(shift: float, scatter: float) -> Estimate:
    """Return the estimate for rounds at the quantiles of a normal distribution; parameters are logarithms.

    The estimate equals the shift. Baseline and head are shuffled alike, so they contain no drift.
    """
    spots = [NormalDist().inv_cdf((index + 0.5) / ROUNDS) for index in range(ROUNDS)]
    Random(1).shuffle(spots)
    base = tuple(LEVEL_J * exp(scatter * spot) for spot in spots)
    return compare_samples(Sample(base), Sample(tuple(value * exp(shift) for value in base)), NOISY_RULE)


def simulate_examples() -> list[Example]:
    """Return one comparison per example."""
    found = []
    for index, (change, noise) in enumerate(EXAMPLES):
        base, head = draw_rounds(Machine(noise=noise), [ROUNDS], "abba", Random(index))
        judged = compare_samples(base, first_rounds(head, ROUNDS, 1 + change))
        found.append(Example(change, noise, judged))
    return found


def main(picture: Path) -> None:
    """Draw the plane of estimate and half width, and example intervals with the limits of the verdicts."""
    plot = configure_pyplot("verdicts")
    figure, (plane, bars) = plot.subplots(
        1, 2, figsize=(9.5, 4.4), width_ratios=(1.1, 1), layout="constrained"
    )
    _draw_plane(plane)
    _draw_bars(bars, simulate_examples())
    save_picture(figure, picture)


def _half_width(estimate: Estimate) -> float:
    assert estimate.low is not None
    assert estimate.high is not None
    return (log(estimate.high) - log(estimate.low)) / 2


def _draw_plane(panel: Any) -> None:
    slope = _half_width(estimate_at(0, 0.01)) / 0.01
    names = list(COLOURS)
    verdicts = []
    heights = [WIDTHS[0] + (WIDTHS[1] - WIDTHS[0]) * (row + 0.5) / ROWS for row in range(ROWS)]
    changes = [CHANGES[0] + (CHANGES[1] - CHANGES[0]) * (column + 0.5) / COLUMNS for column in range(COLUMNS)]
    for height in heights:
        scatter = log(1 + height / 100) / slope
        verdicts.append([names.index(estimate_at(log(1 + one / 100), scatter).verdict) for one in changes])
    for index, (name, colour) in enumerate(COLOURS.items()):
        inside = [[1.0 if each == index else 0.0 for each in row] for row in verdicts]
        panel.contourf(changes, heights, inside, levels=(0.5, 1.5), colors=[colour], alpha=0.45)
        spots = [
            (changes[j], heights[i])
            for i, row in enumerate(verdicts)
            for j, one in enumerate(row)
            if one == index
        ]
        x, y = (sum(values) / len(values) for values in zip(*spots, strict=True))
        panel.text(x, y, name, ha="center", va="center")
    _draw_limits(panel)
    panel.set_xlabel("estimate: head against baseline (%)")
    panel.set_ylabel("half width of the interval (%)")
    panel.set_xlim(*CHANGES)
    panel.set_ylim(*WIDTHS)


def _draw_bars(panel: Any, found: list[Example]) -> None:
    for row, each in enumerate(reversed(found)):
        estimate = each.estimate
        assert estimate.ratio is not None
        assert estimate.low is not None
        assert estimate.high is not None
        colour = COLOURS[estimate.verdict]
        low, middle, high = ((one - 1) * 100 for one in (estimate.low, estimate.ratio, estimate.high))
        panel.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="butt")
        panel.plot([middle], [row], color=colour, marker="o", markersize=6)
        panel.text(CHANGES[1] + 0.3, row, estimate.verdict, color=colour, va="center")
    panel.set_yticks(
        range(len(found)), [f"{each.change:+.0%} at {each.noise:.0%} noise" for each in reversed(found)]
    )
    _draw_limits(panel)
    panel.set_xlim(*CHANGES)
    panel.set_ylim(-0.6, len(found) + 0.2)
    panel.set_xlabel(f"estimate and limits (%), {ROUNDS} rounds per side")
    panel.set_xticks(range(-8, 11, 2))


def _draw_limits(panel: Any) -> None:
    for name, at in (
        ("floor", DEFAULT_RULE.floor),
        ("threshold", DEFAULT_RULE.threshold),
        ("tolerance", DEFAULT_RULE.tolerance),
    ):
        panel.axvline(at * 100, color="black", linewidth=0.8, linestyle="--")
        panel.text(
            at * 100,
            1.0,
            name,
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
            transform=panel.get_xaxis_transform(),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
