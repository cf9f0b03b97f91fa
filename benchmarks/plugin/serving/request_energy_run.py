# SPDX-License-Identifier: Apache-2.0
"""Compare energies of requests with the truth, on a simulated board. See the README in this folder."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.measure.request_loads import COURSES, Course, draw

#: Least share of requests within twice their uncertainty, and the largest median error in units of it.
WITHIN, NARROW = 0.95, 0.2


def main() -> None:
    """Print a row for each course of power, tick and noise. The exit code is 1 if one breaks the promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=40, help="loads of 40 requests for each row")
    loads = parser.parse_args().loads
    print("| power follows | tick | noise | within 2 u | within u | median error | median error/u | sum |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    rows = [
        _row(course, latch_ms, noise, loads)
        for course in COURSES
        for latch_ms in (20, 100)
        for noise in (0.0, 0.2)
    ]
    sys.exit(not all(rows))


def _row(course: Course, latch_ms: int, noise: float, loads: int) -> bool:
    rng = Random(f"{course.__name__} {latch_ms} {noise}")
    scores, errors, sums = list[float](), list[float](), list[float]()
    for number in range(loads):
        found = draw(rng, course, latch_ms, noise, "tokens" if number % 4 == 0 else "equal")
        energies_j = found.energies.energy_j
        scores += found.scores
        errors += [abs(each / true - 1) for each, true in zip(energies_j, found.true_j, strict=True)]
        sums.append(abs(math.fsum(energies_j) / (found.round_.energy_j or math.nan) - 1))
    shares = [sum(score <= limit for score in scores) / len(scores) for limit in (2, 1)]
    print(
        f"| {course.__name__} | {latch_ms} ms | {noise:.0%} | {shares[0]:.1%} | {shares[1]:.0%} "
        f"| {median(errors):.1%} | {median(scores):.2f} | {max(sums):.0e} |",
        flush=True,
    )
    return shares[0] >= WITHIN and median(scores) > NARROW and max(sums) < 1e-9


if __name__ == "__main__":
    main()
