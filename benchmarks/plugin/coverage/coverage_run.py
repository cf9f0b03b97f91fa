# SPDX-License-Identifier: Apache-2.0
"""Check the stated uncertainty with thousands of random windows of exactly known energy.

The windows are those of the test suite (tests/energy/cases.py), which runs a few hundred. ``--even MS`` reads
evenly within the same budget, without a prediction of ticks, to show what the prediction is worth.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from pytest_llenergy.energy import sampler
from pytest_llenergy.energy.schedule import Timetable
from tests.energy import watching
from tests.energy.cases import KINDS, Case, Kind, Summary, draw, summarise

#: Limits that the package promises.
COVERED, FULLNESS = 0.95, 0.2

HEADER = ("windows", "resolved", "within 2u", "median error/u", "median error", "two readings")
RULE = ("---", *["---:"] * len(HEADER))


class CountedMachine(watching.Machine):
    """A simulated machine that stays in ``MACHINES`` with the CPU time of its reader."""

    def __init__(self, now_ns: int, holding_ns: tuple[int, int] = (0, 0)) -> None:
        super().__init__(now_ns, holding_ns)
        self.start_ns = now_ns
        MACHINES.append(self)


MACHINES: list[CountedMachine] = []


def read_evenly(every_s: float) -> None:
    """Replace the prediction of ticks by one reading every ``every_s`` seconds."""

    class EvenTimetable(Timetable):
        def next_ns(self, now_ns: int) -> int:
            leader = self._leader
            period_s = (leader.domain.update_period_s or leader.tick_period_s) if leader else None
            self._period_ns = period_s * 1e9 if period_s else None
            return now_ns + round(every_s * 1e9)

    vars(sampler)["Timetable"] = EvenTimetable


def main() -> int:
    """Print the table. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=1000, help="windows per kind (default: 1000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--even", type=float, metavar="MS", help="read every MS milliseconds")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    vars(watching)["Machine"] = CountedMachine
    if args.even is not None:
        read_evenly(args.even / 1e3)
    found = {str(kind): _cases(kind, args.windows, args.seed) for kind in KINDS if args.only in str(kind)}
    rows = {name: summarise(cases) for name, cases in found.items()}
    every = [case for cases in found.values() for case in cases]
    for shape in sorted({case.shape for case in every}):
        rows[f"of these, {shape}"] = summarise([case for case in every if case.shape == shape])
    rows["all"] = summarise(every)
    print(_table(rows))
    elapsed_s = sum(each.now_ns - each.start_ns for each in MACHINES) / 1e9
    spent_s = sum(each.spent_ns for each in MACHINES) / 1e9
    print(f"\nCPU time of the reader: {spent_s / elapsed_s:.2%} of a core")
    if args.json is not None:
        figures: dict[str, Any] = {
            "seed": args.seed,
            "rows": {name: asdict(row) for name, row in rows.items()},
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    covered = all(rows[name].covered >= COVERED for name in found)
    return 0 if covered and rows["all"].fullness > FULLNESS else 1


def _cases(kind: Kind, windows: int, seed: int) -> list[Case]:
    # One seed a window, so that they are the same ones however the reader reads.
    return [draw(Random(f"{kind} {seed} {number}"), kind) for number in range(windows)]


def _table(rows: dict[str, Summary]) -> str:
    lines = [("", *HEADER), RULE, *((name, *_cells(row)) for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Summary) -> tuple[str, ...]:
    return (
        str(row.windows),
        f"{row.resolved / row.windows:.0%}",
        f"{row.covered:.1%}",
        f"{row.fullness:.2f}",
        f"{row.error:.2%}",
        f"{row.naive_error:.2%}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
