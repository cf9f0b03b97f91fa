# SPDX-License-Identifier: Apache-2.0
"""Simulate histories, and count false and missed change points. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, log, log1p, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, median

from pytest_llenergy.compare.history.change_points import MIN_SEGMENT, find_change_points
from pytest_llenergy.compare.limits import MAD_TO_SIGMA

#: Sessions of a history, and how many histories are simulated for each world and step.
LENGTHS = {12: 1000, 60: 1000, 500: 200}
STEPS = (0.02, 0.04)
NOISE = 0.01

#: A step counts as found if a change is at most this many sessions from it.
TOLERANCE = 3

Logs = list[float]
Rule = Callable[[Sequence[float]], list[int]]


def independent(random: Random, count: int) -> Logs:
    """Normal noise."""
    return [random.gauss(0, NOISE) for _ in range(count)]


def outliers(random: Random, count: int) -> Logs:
    """Each session is an outlier with a probability of 3 %, which needs 20 % more on average."""
    return [each + (random.random() < 0.03) * random.expovariate(5) for each in independent(random, count)]


def correlated(random: Random, count: int) -> Logs:
    """AR(1): half of a session's deviation carries over to the next."""
    found = [random.gauss(0, NOISE)]
    while len(found) < count:
        found.append(0.5 * found[-1] + random.gauss(0, NOISE * sqrt(0.75)))
    return found


def heavy_tails(random: Random, count: int) -> Logs:
    """Student's t with three degrees of freedom, scaled by the noise."""
    return [NOISE * random.gauss(0, 1) / sqrt(random.gammavariate(1.5, 2) / 3) for _ in range(count)]


def two_states(random: Random, count: int) -> Logs:
    """The clock has two states, 2 % apart, and changes with a probability of 30 % between sessions."""
    state, found = random.random() < 0.5, []
    for each in independent(random, count):
        found.append(each + 0.02 * state)
        state ^= random.random() < 0.3
    return found


def creep(random: Random, count: int) -> Logs:
    """The level rises by 4 % from the first session to the last."""
    return [each + 0.04 * place / count for place, each in enumerate(independent(random, count))]


WORLDS: dict[str, Callable[[Random, int], Logs]] = {
    "independent": independent,
    "3 % outlier sessions": outliers,
    "AR(1), 0.5": correlated,
    "Student t, 3": heavy_tails,
    "two clock states": two_states,
    "creep of 4 %": creep,
}


def ours(logs: Sequence[float]) -> list[int]:
    """The rule of the package."""
    return find_change_points([exp(each) for each in logs])


def pelt_bic(logs: Sequence[float]) -> list[int]:
    """ruptures: PELT, least squares, Schwarz's criterion, with the scatter between neighbours."""
    import numpy as np
    import ruptures

    variance = (MAD_TO_SIGMA * median(abs(after - before) for before, after in pairwise(logs))) ** 2 / 2
    search = ruptures.KernelCPD(kernel="linear", min_size=MIN_SEGMENT)
    found = search.fit(np.array(logs).reshape(-1, 1)).predict(pen=2 * variance * log(len(logs)))
    return [int(each) for each in found[:-1]]


def rolling_mean(logs: Sequence[float]) -> list[int]:
    """The mean of three sessions is 2 % from that of the ten before; the largest of adjacent alarms."""
    found: list[tuple[int, float]] = []
    for place in range(5, len(logs) - 2):
        step = abs(fmean(logs[place : place + 3]) - fmean(logs[max(0, place - 10) : place]))
        if step < log1p(0.02):
            continue
        if not found or place - found[-1][0] > 10:
            found.append((place, step))
        elif step > found[-1][1]:
            found[-1] = place, step
    return [place for place, _ in found]


def select_rules() -> dict[str, Rule]:
    """Return the rules, without those of packages that are not installed."""
    rules: dict[str, Rule] = {"llenergy": ours, "rolling mean, 2 %": rolling_mean}
    try:
        import ruptures  # noqa: F401  # only whether it is installed
    except ImportError:
        print("ruptures is not installed; left out", file=sys.stderr)
    else:
        rules["ruptures, PELT, BIC"] = pelt_bic
    return rules


def simulate(world: str, length: int, step: float, count: int) -> list[tuple[int, Logs]]:
    """Return histories with a step in their middle half, and the place of the step."""
    random = Random(f"{world} {length} {step}")
    found = []
    for _ in range(count):
        place = random.randrange(length // 4, length * 3 // 4 + 1)
        logs = WORLDS[world](random, length)
        found.append((place, [each + log1p(step) * (i >= place) for i, each in enumerate(logs)]))
    return found


def main() -> None:
    """Print the table in Markdown, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="simulate only this share of the histories")
    parser.add_argument("--json", type=Path, default=Path("change_points.json"))
    args = parser.parse_args()
    rules = select_rules()
    rows = []
    print("|sessions|world|rule|false|found +2 %|off by|found +4 %|off by|")
    print("|---:|---|---|---:|---:|---:|---:|---:|")
    for length, full in LENGTHS.items():
        count = max(1, round(full * args.share))
        for world in WORLDS:
            flat = simulate(world, length, 0.0, count)
            stepped = {step: simulate(world, length, step, count) for step in STEPS}
            for name, rule in rules.items():
                false = fmean(len(rule(logs)) for _, logs in flat)
                cells = [f"{false:.2f}"]
                row = {"sessions": length, "world": world, "rule": name, "histories": count, "false": false}
                for step, histories in stepped.items():
                    # One past the tolerance stands for no change at all.
                    distances = [
                        min((abs(each - place) for each in rule(logs)), default=TOLERANCE + 1)
                        for place, logs in histories
                    ]
                    near = [each for each in distances if each <= TOLERANCE]
                    found, off = len(near) / count, fmean(near) if near else None
                    row |= {f"found {step}": found, f"off {step}": off}
                    cells += [f"{found:.1%}", f"{off:.1f}" if off is not None else "–"]
                rows.append(row)
                print(f"|{length}|{world}|{name}|{'|'.join(cells)}|", flush=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
