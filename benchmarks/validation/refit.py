# SPDX-License-Identifier: Apache-2.0
"""Run the gate's simulation with the measured noise of a board.

``python -m benchmarks.validation.refit report.json --suites 200`` repeats it from a report, without a GPU and
with more suites than the part ``accuracy`` has time for.
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

#: Robust standard deviations beyond which a round is an outlier, as in the gate's simulation.
OUTLIER = 3.0

#: Standard deviation of a normal distribution over its median absolute deviation.
MAD_TO_SIGMA = 1.4826

#: Lower limit of the noise: shares of a noise of zero are undefined.
MIN_NOISE = 1e-5

#: Number of rounds at the start of the session that the ramp is fitted to.
RAMP_ROUNDS = 4


def add_gate_to_path() -> None:
    """Add the folder of the gate's simulation, which consists of scripts, to ``sys.path``."""
    folder = str(ROOT / "benchmarks" / "plugin" / "gate")
    if folder not in sys.path:
        sys.path.insert(0, folder)


def fit_machine(values: Sequence[float]) -> Machine:
    """Fit the simulation's parameters to the joules of at least 12 equal rounds in order of time."""
    add_gate_to_path()
    from gate_world import Machine

    logs = [math.log(value) for value in values]
    later = logs[len(logs) // 2 :]
    ramp = median(later) - median(logs[:RAMP_ROUNDS])
    level = _fit_line(logs)
    rest = [log - on for log, on in zip(logs, level, strict=True)]
    noise = max(MAD_TO_SIGMA * median(abs(one) for one in rest), MIN_NOISE)
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


def _fit_line(logs: Sequence[float]) -> list[float]:
    """Fit a straight line with the Theil-Sen estimator, which is robust against outliers."""
    slopes = [
        (after - before) / (j - i)
        for i, before in enumerate(logs)
        for j, after in enumerate(logs[i + 1 :], i + 1)
    ]
    slope = median(slopes)
    start = median(log - slope * place for place, log in enumerate(logs))
    return [start + slope * place for place in range(len(logs))]


def to_primitives(world: Machine) -> dict[str, Any]:
    """Return the parameters as JSON primitives."""
    return asdict(world)


def simulate_gate(world: Machine, suites: int) -> dict[str, Any]:
    """Simulate the gate on ``suites`` suites of 50 benchmarks with this noise; a suite takes some seconds."""
    add_gate_to_path()
    from gate_run import Cell, simulate_cell

    return simulate_cell(
        Cell("as measured", world, suites=suites, changed=max(1, suites // 6)), seed=1, share=1.0
    )


def result_rows(cell: dict[str, Any]) -> tuple[list[str], list[list[str | float | int | None]]]:
    """Return the columns and rows that show the results of a simulation."""
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


def add_results(notebook: Notebook, cell: dict[str, Any]) -> None:
    """Add the results of a simulation to the part."""
    columns, found = result_rows(cell)
    note = "Few suites: python -m benchmarks.validation.refit report.json simulates more."
    notebook.table("The gate, simulated with the noise of this board", columns, found, note)


def main(argv: Sequence[str]) -> int:
    """Run the simulation from a report or from the result file of the part ``accuracy``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--suites", type=int, default=60, metavar="N", help="of 50 benchmarks (60)")
    args = parser.parse_args(argv)
    report = decode(args.report.read_bytes())
    values = next((part.data.get("abba_j") for part in report.parts if part.name == "accuracy"), None)
    if not values:
        print(f"{args.report}: its part accuracy has no A/B rounds (data: abba_j)", file=sys.stderr)
        return 2
    world = fit_machine(values)
    print(to_primitives(world), flush=True)
    columns, found = result_rows(simulate_gate(world, args.suites))
    print("\t".join(columns))
    for row in found:
        print("\t".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
