# SPDX-License-Identifier: Apache-2.0
"""Check the stated uncertainty of a median of rounds, and of rounds that were added to meet the target.

The rounds are those of the test suite (tests/measure/simulated_rounds.py). ``--factors`` computes the factors
of ``measure/round_statistics.py`` for a given number of rounds instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from statistics import NormalDist, median, quantiles

sys.path.insert(0, str(Path(__file__).parents[3]))

from pytest_llenergy.record import round_statistics
from tests.measure.simulated_rounds import Scatter, cold_start, delays, normal, repeat

SCATTERS: dict[str, Scatter] = {
    **{f"normal, {percent} %": normal(percent / 100) for percent in (1, 3, 5, 20)},
    "lognormal delays of 5 %": delays,
    "cold start": cold_start,
}


def print_coverage(repeats: int) -> None:
    """Print how often the truth lies within 2u, with given numbers of rounds and with added rounds."""
    print("|scatter|rounds|within 2u|mean rounds|target met|mean u|\n|---|---|---:|---:|---:|---:|")
    for name, scatter in SCATTERS.items():
        given = [(rounds, False) for rounds in (range(2, 13) if name == "normal, 5 %" else (6,))]
        for rounds, added in [*given, *((rounds, True) for rounds in (2, 3, 4, 6))]:
            found = repeat(scatter, rounds, added=added, repeats=repeats)
            print(
                f"|{name}|{f'{rounds} or more' if added else rounds}|{found.within:.1%}|{found.rounds:.1f}|"
                f"{found.met:.0%}|{found.u:.1%}|",
                flush=True,
            )


def print_factors(repeats: int) -> None:
    """Print the factor for which twice the uncertainty covers 95.45 % of medians of normal values."""
    rng, share = Random(1), 2 * NormalDist().cdf(2) - 1
    for n in [*range(3, 21), 25, 33, 49, 100]:
        factor = round_statistics.HALF_INTERVAL.get(n, round_statistics.HALF_INTERVAL_OF_MANY)
        ratios = []
        for _ in range(repeats):
            values = [rng.gauss(0, 1) for _ in range(n)]
            u = round_statistics.uncertainty_of_median(values) / factor
            ratios.append(abs(median(values)) / (2 * u))
        print(
            f"{n}: {quantiles(ratios, n=10_000)[round(share * 10_000) - 1]:.3f} (in use: {factor:g})",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5000, help="tests per row (default: 5000)")
    parser.add_argument("--factors", action="store_true", help="compute factors, for 20 times as many tests")
    args = parser.parse_args()
    if args.factors:
        print_factors(20 * args.repeats)
    else:
        print_coverage(args.repeats)
