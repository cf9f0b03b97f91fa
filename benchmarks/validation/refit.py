# SPDX-License-Identifier: Apache-2.0
"""The gate's simulation with the noise of a real board instead of a guessed one.

python -m benchmarks.validation.refit report.json --suites 200

does it again from a report, at leisure and without a GPU; what ``accuracy`` has time for is a glance.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .machine import ROOT
from .results import decode

if TYPE_CHECKING:
    from gate_world import Machine

    from .part import Notebook

#: Robust standard deviations beyond which a round is an outlier, as the gate's simulation has them.
OUTLIER = 3.0

#: Scatter of a normal law over its median absolute deviation.
MAD_TO_SIGMA = 1.4826

#: What is taken of a noise that is too small to be seen: a share of nothing is none.
LEAST_NOISE = 1e-5

#: Rounds that count as the beginning of the session, for the ramp.
BEGINNING = 4


def gate_on_path() -> None:
    """The simulation is a program of its own, in a folder beside this one."""
    folder = str(ROOT / "benchmarks" / "plugin" / "gate")
    if folder not in sys.path:
        sys.path.insert(0, folder)


def fitted(values: Sequence[float]) -> Machine:
    """The simulation's parameters from the joules of equal rounds in the order of time, 12 at the least."""
    gate_on_path()
    from gate_world import Machine

    logs = [math.log(value) for value in values]
    later = logs[len(logs) // 2 :]
    ramp = median(later) - median(logs[:BEGINNING])
    level = _line(logs)
    rest = [log - on for log, on in zip(logs, level, strict=True)]
    noise = max(MAD_TO_SIGMA * median(abs(one) for one in rest), LEAST_NOISE)
    high = [one / noise for one in rest if one > OUTLIER * noise]
    calm = [max(-OUTLIER * noise, min(OUTLIER * noise, one)) for one in rest]
    squares = math.fsum(one * one for one in calm)
    products = math.fsum(one * after for one, after in pairwise(calm))
    memory = products / squares if squares else 0.0
    return Machine(
        noise=noise,
        memory=round(max(0.0, min(0.95, memory)), 3),
        outliers=len(high) / len(rest),
        outlier_size=fmean(high) if high else 1.0,
        ramp=ramp,
        ramp_sd=abs(ramp) / 2,
        ramp_rounds=8.0,
    )


def _line(logs: Sequence[float]) -> list[float]:
    """The straight line through all of them: Theil's, which outliers do not bend."""
    slopes = [
        (after - before) / (j - i)
        for i, before in enumerate(logs)
        for j, after in enumerate(logs[i + 1 :], i + 1)
    ]
    slope = median(slopes)
    start = median(log - slope * place for place, log in enumerate(logs))
    return [start + slope * place for place in range(len(logs))]


def plain(world: Machine) -> dict[str, Any]:
    """For JSON."""
    return asdict(world)


def simulated(world: Machine, suites: int) -> dict[str, Any]:
    """The gate on so many suites of 50 benchmarks with such noise; a suite takes some seconds."""
    gate_on_path()
    from gate_run import Cell, run_cell

    return run_cell(Cell("as measured", world, suites=suites, changed=max(1, suites // 6)), seed=1, share=1.0)


def rows(cell: dict[str, Any]) -> tuple[list[str], list[list[str | float | int | None]]]:
    """Columns and rows of what a simulation has found."""
    columns = ["rule", "benchmarks", "alarms", "unchanged %", "found +3 %", "found +5 %", "found +10 %"]
    found: list[list[str | float | int | None]] = []
    for name, by_effect in cell["contenders"].items():
        same = by_effect["0"]
        shares = [
            100 * by_effect[effect]["verdicts"].get("regressed", 0) / by_effect[effect]["benchmarks"]
            for effect in ("0.03", "0.05", "0.1")
        ]
        alarms = same["verdicts"].get("regressed", 0)
        unchanged = 100 * same["verdicts"].get("unchanged", 0) / same["benchmarks"]
        found.append([name, same["benchmarks"], alarms, unchanged, *shares])
    return columns, found


def tabulate(notebook: Notebook, cell: dict[str, Any]) -> None:
    """Into the report."""
    columns, found = rows(cell)
    note = "A glance: python -m benchmarks.validation.refit report.json has more suites."
    notebook.table("The gate, simulated with the noise of this board", columns, found, note)


def main(argv: Sequence[str]) -> int:
    """From a report, or from the file of the part ``accuracy``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--suites", type=int, default=60, metavar="N", help="of 50 benchmarks (60)")
    given = parser.parse_args(argv)
    report = decode(given.report.read_bytes())
    values = next((part.data.get("abba_j") for part in report.parts if part.name == "accuracy"), None)
    if not values:
        print(f"{given.report}: its part accuracy has no rounds in turn (data: abba_j)", file=sys.stderr)
        return 2
    world = fitted(values)
    print(plain(world), flush=True)
    columns, found = rows(simulated(world, given.suites))
    print("\t".join(columns))
    for row in found:
        print("\t".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
