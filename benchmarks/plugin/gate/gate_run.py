# SPDX-License-Identifier: Apache-2.0
"""Simulate how often the gate and the rules of other tools are wrong. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gate_rules import asv_5_percent, codspeed, codspeed_3_percent, mann_whitney, mean_5_percent, welch
from gate_table import markdown, summary
from gate_world import Machine, Order, draw_rounds, first_rounds

from pytest_llenergy.compare.stages import DEFAULT_STAGES, Stages, decide_stage
from pytest_llenergy.compare.statistics import (
    STORED,
    Estimate,
    Sample,
    compare_samples,
    correct_multiple_comparisons,
)

NOISES = (0.005, 0.01, 0.02, 0.03, 0.05)
EFFECTS = (0.01, 0.02, 0.03, 0.05, 0.10, 1 / 1.05 - 1)
SUITE_SIZE = 50

#: Stages that find only changes clearly above the threshold, in few pairs.
SHORT_STAGES = Stages((6, 6))

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
    decide: Callable[[Sample, Sample], Outcome]
    corrected: bool = False

    @property
    def name_corrected(self) -> str:
        """Name with the correction."""
        return f"{self.name}, suite corrected"


def fixed_rule(name: str, red: Callable[[Values, Values], bool], pairs: int) -> Contender:
    """Return a rule that decides once after a fixed number of pairs."""

    def decide(base: Sample, head: Sample) -> Outcome:
        is_red = red(base.values[:pairs], head.values[:pairs])
        return Outcome("regressed" if is_red else "unchanged", pairs)

    return Contender(f"{name}, {pairs} pairs", decide)


def stored_rule(rounds: int) -> Contender:
    """Return the plugin's rule for a stored baseline, which looks once."""

    def decide(base: Sample, head: Sample) -> Outcome:
        estimate = compare_samples(first_rounds(base, rounds), first_rounds(head, rounds), design=STORED)
        return Outcome(estimate.verdict, rounds, estimate)

    return Contender(f"ours, stored, {rounds} rounds", decide)


def staged_rule(stages: Stages) -> Contender:
    """Return the plugin's rule in stages."""

    def decide(base: Sample, head: Sample) -> Outcome:
        stage = 0
        while True:
            stage += 1
            pairs = stages.pairs_after(stage)
            step = decide_stage(first_rounds(base, pairs), first_rounds(head, pairs), stage, stages)
            if step.done:
                return Outcome(step.estimate.verdict, pairs, step.estimate)

    return Contender(f"ours, {stages}", decide, corrected=True)


PEERS = (
    fixed_rule("mean:5%", mean_5_percent, 12),
    fixed_rule("Welch", welch, 12),
    fixed_rule("Mann-Whitney", mann_whitney, 12),
    fixed_rule("asv, factor 1.05", asv_5_percent, 12),
    fixed_rule("CodSpeed, 10%", codspeed, 12),
    fixed_rule("CodSpeed, 3%", codspeed_3_percent, 12),
)
PAIRED = (staged_rule(SHORT_STAGES), staged_rule(DEFAULT_STAGES))
STORED_RULES = (stored_rule(6), stored_rule(12))


@dataclass(frozen=True)
class Cell:
    """A simulated machine, and the order of rounds on it.

    ``suites`` are simulated for false alarms; in the first ``changed`` of them benchmarks are also changed.
    """

    name: str
    machine: Machine
    order: Order = "abba"
    suites: int = 400
    changed: int = 60
    #: Relative difference of the head's session, although the code is the same.
    day: float = 0.0

    @property
    def ours(self) -> Sequence[Contender]:
        """The plugin's rules for rounds in this order."""
        return STORED_RULES if self.order == "stored" else PAIRED

    @property
    def contenders(self) -> Sequence[Contender]:
        """All rules."""
        return (*PEERS, *self.ours)


#: Machines on which nothing differs between sessions but what their name says.
PLAIN = Machine(0.02, memory=0.0, outliers=0.0, ramp=0.0, ramp_sd=0.0, offset=0.0)

#: Ways in which rounds scatter. Each has a standard deviation of about 2 %, outliers and load apart.
WORLDS = {
    "independent rounds": PLAIN,
    "drift of 4 %": replace(PLAIN, ramp=0.04),
    "a twentieth of rounds three times as high": replace(PLAIN, spikes=0.05),
    "heavy tails (t, 3 degrees)": replace(PLAIN, degrees=3),
    "two clock states, 4 % apart": replace(PLAIN, noise=0.005, states=0.04),
    "memory of 0.7": replace(PLAIN, memory=0.7),
    "other processes, 0.5 cores, +10 % each": replace(PLAIN, load=0.5, load_effect=0.10),
    "all at once": Machine(0.02),
}


def list_cells() -> list[Cell]:
    """Return the worlds in pairs, other levels of noise, other orders, and stored baselines."""
    common = WORLDS["all at once"]
    alike = {name: machine for name, machine in WORLDS.items() if name != "all at once"}
    return [
        *(Cell(f"{name}, in pairs", machine, suites=2000) for name, machine in WORLDS.items()),
        *(Cell(f"{noise:.1%} noise", Machine(noise)) for noise in NOISES if noise != common.noise),
        Cell("each stage in another session", common, "apart"),
        Cell("all of the baseline, then all of the head", common, "blocks"),
        *(Cell(f"{name}, stored", machine, "stored") for name, machine in alike.items()),
        Cell("another day, +1.5 %, stored", PLAIN, "stored", day=0.015),
        Cell("sessions differ by 1 %, stored", replace(PLAIN, offset=0.01), "stored"),
        Cell("sessions differ by 2 %, stored", replace(PLAIN, offset=0.02), "stored"),
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
    contender: Contender, drawn: Sequence[tuple[Sample, Sample]], effects: Sequence[float], tallies: Tallies
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
            outcome = contender.decide(base, first_rounds(head, len(head.values), 1 + effect))
            tallies[contender.name][effect].add(outcome.verdict, outcome.pairs)
            if contender.corrected and outcome.estimate is not None:
                suite = [*estimates[:i], outcome.estimate, *estimates[i + 1 :]]
                verdict = correct_multiple_comparisons(suite)[i].verdict
                tallies[contender.name_corrected][effect].add(verdict, outcome.pairs)


def simulate_cell(cell: Cell, seed: int, share: float) -> dict[str, Any]:
    """Run all contenders on the same rounds; rules of other tools only on the changed suites."""
    start_s = time.monotonic()
    suites, changed = (max(1, round(share * count)) for count in (cell.suites, cell.changed))
    random = Random(f"{seed}: {cell.name}")
    names = [one.name for one in cell.contenders] + [one.name_corrected for one in cell.ours if one.corrected]
    tallies = {name: {effect: Tally() for effect in (0.0, *EFFECTS)} for name in names}
    for suite in range(suites):
        drawn = [
            draw_rounds(cell.machine, DEFAULT_STAGES.pairs, cell.order, random) for _ in range(SUITE_SIZE)
        ]
        drawn = [(base, first_rounds(head, len(head.values), 1 + cell.day)) for base, head in drawn]
        for contender in cell.contenders if suite < changed else cell.ours:
            simulate_suite(contender, drawn, EFFECTS if suite < changed else (), tallies)
    return {
        "cell": cell.name,
        "order": cell.order,
        "machine": asdict(cell.machine),
        "seconds": time.monotonic() - start_s,
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
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (as many as CPUs)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--only", metavar="NAME", help="only cells whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("gate.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="also write the tables of docs/gating.md"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run the simulation, print the tables, write the files."""
    args = parse_arguments(argv)
    content: dict[str, Any] = {"seed": args.seed, "share": args.share, "suite": SUITE_SIZE, "cells": []}
    cells = [cell for cell in list_cells() if not args.only or args.only in cell.name]
    with ProcessPoolExecutor(args.jobs) as pool:
        for result in pool.map(partial(simulate_cell, seed=args.seed, share=args.share), cells):
            print(f"{result['cell']}: {result['seconds']:.0f} s", flush=True)
            content["cells"].append(result)
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    tables = markdown(content)
    print(f"\n{tables}")
    if args.markdown:
        args.markdown.write_text(tables)
    if args.summary:
        args.summary.write_text(summary(content))


if __name__ == "__main__":
    main(sys.argv[1:])
