# SPDX-License-Identifier: Apache-2.0
"""Simulate how often the gate and the rules of other tools are wrong. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from gate_rules import asv, asv_5_percent, mann_whitney, mean_5_percent, welch
from gate_table import markdown
from gate_world import Machine, Order, draw_rounds

from pytest_llenergy.compare.stages import DEFAULT_STAGES, Stages, decide_stage
from pytest_llenergy.compare.statistics import Estimate, Sample, compare_samples, correct_multiple_comparisons

NOISES = (0.005, 0.01, 0.02, 0.03, 0.05)
EFFECTS = (0.02, 0.03, 0.05, 0.10, 1 / 1.05 - 1)
SUITE_SIZE = 50

#: Stages that find changes of exactly the threshold.
SHARP_STAGES = Stages((6, 6, 12, 12))
MAX_PAIRS = SHARP_STAGES.pairs_after(len(SHARP_STAGES.pairs))

Values = Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """A rule's result for one benchmark: verdict, pairs used, and its estimate, if it has one."""

    verdict: str
    pairs: int
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Contender:
    """A rule and the rounds it gets; ``corrected``: also evaluated with the correction for its suite."""

    name: str
    decide: Callable[[Values, Values], Outcome]
    corrected: bool = False

    @property
    def name_corrected(self) -> str:
        """Name with the correction."""
        return f"{self.name}, suite corrected"


def fixed_rule(name: str, red: Callable[[Values, Values], bool], pairs: int) -> Contender:
    """Return a rule that decides once after a fixed number of pairs."""

    def decide(base: Values, head: Values) -> Outcome:
        return Outcome("regressed" if red(base[:pairs], head[:pairs]) else "unchanged", pairs)

    return Contender(f"{name}, {pairs} pairs", decide)


def one_stage_rule(pairs: int) -> Contender:
    """Return the plugin's rule without a second stage."""

    def decide(base: Values, head: Values) -> Outcome:
        estimate = compare_samples(Sample(tuple(base[:pairs])), Sample(tuple(head[:pairs])))
        return Outcome(estimate.verdict, pairs, estimate)

    return Contender(f"ours, one stage, {pairs} pairs", decide)


def staged_rule(stages: Stages) -> Contender:
    """Return the plugin's rule in stages."""

    def decide(base: Values, head: Values) -> Outcome:
        stage = 0
        while True:
            stage += 1
            pairs = stages.pairs_after(stage)
            step = decide_stage(Sample(tuple(base[:pairs])), Sample(tuple(head[:pairs])), stage, stages)
            if step.done:
                return Outcome(step.estimate.verdict, pairs, step.estimate)

    return Contender(f"ours, {stages}", decide, corrected=True)


PEERS = (
    fixed_rule("mean:5%", mean_5_percent, 12),
    fixed_rule("Welch", welch, 12),
    fixed_rule("Mann-Whitney", mann_whitney, 12),
    fixed_rule("asv, factor 1.1", asv, 12),
    fixed_rule("asv, factor 1.05", asv_5_percent, 12),
)
OURS = (
    one_stage_rule(12),
    staged_rule(DEFAULT_STAGES),
    staged_rule(Stages((6, 6, 18))),
    staged_rule(SHARP_STAGES),
)
CONTENDERS = (*PEERS, *OURS)


@dataclass(frozen=True)
class Cell:
    """A simulated machine, and the order of rounds on it.

    ``suites`` are simulated for false alarms; in the first ``changed`` of them benchmarks are also changed.
    """

    name: str
    machine: Machine
    order: Order = "abba"
    suites: int = 100
    changed: int = 100


def list_cells() -> list[Cell]:
    """Return one cell per noise level, then variations of machine and order at 2 % noise."""
    common = Machine(0.02)
    noises = [Cell(f"{noise:.1%} noise", Machine(noise), suites=400) for noise in NOISES if noise != 0.02]
    return [
        Cell("2.0% noise", common, suites=2000, changed=300),
        *noises,
        Cell("2.0% noise, 4 % ramp", replace(common, ramp=0.04)),
        Cell("2.0% noise, memory 0.5", replace(common, memory=0.5)),
        Cell("2.0% noise, twice as many outliers", replace(common, outliers=0.1)),
        Cell("2.0% noise, each stage in another session", common, "apart"),
        Cell("2.0% noise, all of the baseline, then all of the head", common, "blocks"),
        Cell("2.0% noise, baseline from another session", common, "stored"),
    ]


class Tally:
    """Counts of one contender in one cell for one true change."""

    def __init__(self) -> None:
        self.count = self.pairs = self.suites = self.suites_with_alarm = 0
        self.verdicts: dict[str, int] = {}

    def add(self, verdict: str, pairs: int) -> None:
        self.count += 1
        self.pairs += pairs
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON primitives."""
        return {
            "benchmarks": self.count,
            "suites": self.suites,
            "suites_with_alarm": self.suites_with_alarm,
            "mean_pairs": self.pairs / self.count,
            "verdicts": self.verdicts,
        }


Tallies = dict[str, dict[float, Tally]]


def simulate_suite(
    contender: Contender, drawn: Sequence[tuple[Values, Values]], effects: Sequence[float], tallies: Tallies
) -> None:
    """Simulate one suite without a change (effect 0), then with each of its benchmarks changed in turn."""
    same = [contender.decide(base, head) for base, head in drawn]
    estimates = [outcome.estimate for outcome in same if outcome.estimate is not None]
    verdicts = {contender.name: [outcome.verdict for outcome in same]}
    if contender.corrected:
        verdicts[contender.name_corrected] = [
            estimate.verdict for estimate in correct_multiple_comparisons(estimates)
        ]
    for name, mine in verdicts.items():
        tally = tallies[name][0.0]
        for verdict, outcome in zip(mine, same, strict=True):
            tally.add(verdict, outcome.pairs)
        tally.suites += 1
        tally.suites_with_alarm += "regressed" in mine
    for effect in effects:
        for i, (base, head) in enumerate(drawn):
            outcome = contender.decide(base, [(1 + effect) * value for value in head])
            tallies[contender.name][effect].add(outcome.verdict, outcome.pairs)
            if contender.corrected and outcome.estimate is not None:
                suite = [*estimates[:i], outcome.estimate, *estimates[i + 1 :]]
                verdict = correct_multiple_comparisons(suite)[i].verdict
                tallies[contender.name_corrected][effect].add(verdict, outcome.pairs)


def simulate_cell(cell: Cell, seed: int, share: float) -> dict[str, Any]:
    """Run all contenders on the same rounds; rules of other tools only on the changed suites."""
    suites, changed = (max(1, round(share * count)) for count in (cell.suites, cell.changed))
    random = Random(f"{seed}: {cell.name}")
    names = [one.name for one in CONTENDERS] + [one.name_corrected for one in OURS if one.corrected]
    tallies = {name: {effect: Tally() for effect in (0.0, *EFFECTS)} for name in names}
    for suite in range(suites):
        drawn = [draw_rounds(cell.machine, SHARP_STAGES.pairs, cell.order, random) for _ in range(SUITE_SIZE)]
        for contender in CONTENDERS if suite < changed else OURS:
            simulate_suite(contender, drawn, EFFECTS if suite < changed else (), tallies)
    return {
        "cell": cell.name,
        "order": cell.order,
        "machine": asdict(cell.machine),
        "contenders": {
            name: {f"{effect:g}": tally.summary() for effect, tally in by_effect.items()}
            for name, by_effect in tallies.items()
        },
    }


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--share", type=float, default=1.0, metavar="X", help="share of all suites to simulate (1.0)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--only", metavar="NAME", help="only cells whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("gate.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run the simulation, print the tables, write the files."""
    args = parse_arguments(argv)
    content: dict[str, Any] = {"seed": args.seed, "share": args.share, "suite": SUITE_SIZE, "cells": []}
    for cell in list_cells():
        if args.only and args.only not in cell.name:
            continue
        start_s = time.monotonic()
        print(cell.name, end=" ... ", flush=True)
        content["cells"].append(simulate_cell(cell, args.seed, args.share))
        args.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{time.monotonic() - start_s:.0f} s", flush=True)
    tables = markdown(content)
    print(f"\n{tables}")
    if args.markdown:
        args.markdown.write_text(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
