# SPDX-License-Identifier: Apache-2.0
"""Check windows in a loop and phases of a round in simulated worlds of exactly known energy.

Each row is a world with its lengths: how many results have a number, how many of those lie within two
standard uncertainties, the mean and the median of their error in standard uncertainties, their median
relative error. The worlds are those of the test suite
(tests/energy/worlds.py), which runs fewer of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.energy.worlds import WORLDS, Result, loop, phases

LOOPS = [(length_ms, rest_ms) for length_ms in (50, 100, 300) for rest_ms in (10, 50, 100)]
PHASES = ((20, 150), (40, 160), (60, 200), (150, 500))


def row(name: str, results: Sequence[Result]) -> str:
    """Return a row of the table."""
    found = [each for each in results if each.energy.energy_j is not None]
    if not found:
        return f"|{name}|0 %|-|-|-|-|"
    within = fmean(abs(each.score) <= 2 for each in found)
    error = median(abs((each.energy.energy_j or 0.0) / each.true_j - 1) for each in found)
    bias, typical = fmean(each.score for each in found), median(abs(each.score) for each in found)
    shown = f"{len(found) / len(results):.0%}|{within:.1%}|{bias:+.2f}|{typical:.2f}|{error:.1%}"
    return f"|{name}|{shown}|"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="loops or rounds a row (default: 50)")
    args = parser.parse_args()
    print("|world|resolved|within 2u|mean error/u|median error/u|median error|")
    print("|---|---:|---:|---:|---:|---:|")
    for world in WORLDS:
        for length_ms, rest_ms in LOOPS:
            results = [
                each for seed in range(args.runs) for each in loop(Random(seed), world, length_ms, rest_ms)
            ]
            print(row(f"loop, {world.__name__}, {length_ms} ms, rests of {rest_ms} ms", results), flush=True)
    for ramp in (False, True):
        for prefill_ms, decode_ms in PHASES:
            found = [phases(Random(seed), prefill_ms, decode_ms, ramp=ramp) for seed in range(args.runs)]
            shape = "ramp" if ramp else "even"
            for name, of_phase in zip(("prefill", "decode"), zip(*found, strict=True), strict=True):
                print(row(f"{name}, {shape}, {prefill_ms} + {decode_ms} ms", of_phase), flush=True)


if __name__ == "__main__":
    main()
