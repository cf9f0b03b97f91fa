# SPDX-License-Identifier: Apache-2.0
"""Draw how well the stated uncertainty holds: ``coverage_picture.py PICTURE.svg [WINDOWS]``.

The windows are those of ``coverage_run.py``; 200 per kind by default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import erf, sqrt
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import BLUE, GREY, ORANGE, RED, configure_pyplot, save_picture

from tests.energy.cases import KINDS, Case, draw

#: Smaller relative errors are drawn here.
FLOOR = 1e-6
SEED = 1


def cases(windows: int) -> list[Case]:
    """Return ``windows`` windows per kind, without those that have no result."""
    found = [draw(rng, kind) for kind in KINDS for rng in [Random(f"{kind} {SEED}")] for _ in range(windows)]
    return [case for case in found if case.energy.energy_j is not None]


def main(picture: Path, windows: int) -> None:
    """Draw each window's error over its stated uncertainty, and how often it is within k times that."""
    found = cases(windows)
    plot = configure_pyplot("coverage")
    figure, (scatter, curve) = plot.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    _draw_scatter(scatter, found)
    _draw_curve(curve, found)
    figure.suptitle(
        f"{len(found)} windows of 10 ms to 10 s with a result, of {windows * len(KINDS)}; "
        f"{_share(found, 2):.1%} of them within 2u",
        fontsize=9,
    )
    save_picture(figure, picture)


def _draw_scatter(panel: Any, found: Sequence[Case]) -> None:
    stated = [(case.energy.u_j or 0.0) / case.true_j for case in found]
    error = [max(abs((case.energy.energy_j or 0.0) / case.true_j - 1), FLOOR) for case in found]
    bare = [max(abs(case.naive_j / case.true_j - 1), FLOOR) for case in found]
    # Thousands of dots are smaller as a bitmap.
    dots = {"marker": ".", "linestyle": "", "markersize": 2, "rasterized": True}
    panel.plot(stated, bare, color=RED, alpha=0.5, label="two readings", **dots)
    panel.plot(stated, error, color=BLUE, label="this tool", **dots)
    ends = [1e-5, 0.4]
    panel.plot(ends, [2 * one for one in ends], color="black", linewidth=1, label="error = 2u")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(*ends)
    panel.set_ylim(FLOOR, 3)
    panel.set_xticks((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), ("0.001%", "0.01%", "0.1%", "1%", "10%"))
    panel.set_yticks((1e-6, 1e-4, 1e-2, 1), ("0.0001%", "0.01%", "1%", "100%"))
    panel.minorticks_off()
    panel.set_xlabel("stated standard uncertainty u, relative")
    panel.set_ylabel("true error, relative")
    panel.grid(visible=True, color="#dddddd", linewidth=0.6)
    panel.legend(frameon=False, loc="lower right", markerscale=5)


def _draw_curve(panel: Any, found: Sequence[Case]) -> None:
    multiples = [index / 20 for index in range(81)]
    full = [case for case in found if not case.kind.part_time and not case.kind.integrated]
    part = [case for case in found if case.kind.part_time]
    integrated = [case for case in found if case.kind.integrated]
    for name, some, colour in (
        ("counter", full, BLUE),
        ("counter of a part-time sensor", part, ORANGE),
        ("power integrated", integrated, GREY),
    ):
        panel.plot(multiples, [_share(some, k) * 100 for k in multiples], color=colour, label=name)
    normal = [erf(k / sqrt(2)) * 100 for k in multiples]
    panel.plot(multiples, normal, color="black", linestyle=":", linewidth=1, label="if errors were normal")
    panel.axvline(2, color="#bbbbbb", linewidth=0.8, zorder=0)
    panel.set_xlim(0, 4)
    panel.set_ylim(0, 101)
    panel.set_xlabel("k")
    panel.set_ylabel("windows with |error| ≤ k · u (%)")
    panel.legend(frameon=False, loc="lower right")


def _share(found: Sequence[Case], k: float) -> float:
    return sum(case.score <= k for case in found) / len(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
