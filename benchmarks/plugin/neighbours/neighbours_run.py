# SPDX-License-Identifier: Apache-2.0
"""Measure busy loops of known CPU time beside busy neighbours. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.estimate import AVERAGE_W
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, plan_processes
from pytest_llenergy.ranks.workload import call_workload
from tests.measure.marks import measure

LOOPS_S = (1.0, 2.0, 4.0)
NEIGHBOURS = (0, 1, 4)

#: Number of ranks; 0 is work in this process.
RANKS = (0, 1, 2)

#: Power of an idle logical CPU in the model of the whole host (W).
IDLE_W = 0.74


@dataclass(frozen=True)
class Row:
    """One experiment. ``host_j`` is what a model of the whole host gives for the same rounds."""

    loop_s: float
    neighbours: int
    ranks: int
    energy_j: float
    u_j: float
    host_j: float
    duration_s: float

    @property
    def truth_j(self) -> float:
        """Watts of a busy CPU times the CPU time of the loops."""
        return AVERAGE_W * self.loop_s * max(1, self.ranks)


def spin(loop_s: float) -> None:
    """Use the CPU for so many seconds of this thread's time."""
    end_s = time.thread_time() + loop_s
    while time.thread_time() < end_s:
        pass


@contextmanager
def neighbours(n: int) -> Iterator[None]:
    """Run busy processes that are not descendants of this one."""
    command = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pids = [int(subprocess.check_output(["sh", "-c", command])) for _ in range(n)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)


def run(loop_s: float, ranks: int, rounds: int) -> Experiment:
    """Measure the loop in this process, or on some ranks."""
    plan = RoundPlan(rounds=rounds, warmup=0, gap_s=0.25, target=0.02, budget_s=0.0)
    lease = Lease(("cpu",) * max(1, ranks))
    selection = open_meters(["estimate"], MeterRegistry(), Targets())
    if not ranks:
        return measure(CallWorkload(lambda: spin(loop_s)), plan, selection, lease)
    host = LocalHost("spawn")
    group = RankGroup(plan_processes(Capabilities(data=True), None, lease, usable_cpus()), {LOCALHOST: host})
    try:
        return measure(call_workload(group, spin, (loop_s,), {}, 600.0), plan, selection, lease)
    finally:
        group.close()
        host.close()


def make_row(loop_s: float, beside: int, ranks: int, rounds: int) -> Row:
    """Return one experiment as a row."""
    with neighbours(beside):
        experiment = run(loop_s, ranks, rounds)
    metric = experiment.metrics["energy_j"]
    assert metric.value is not None
    measured = experiment.rounds
    busy_s = fmean((each.energy_j or 0.0) / AVERAGE_W + (each.other_cpu_s or 0.0) for each in measured)
    duration_s = fmean(each.duration_s for each in measured)
    host_j = (os.cpu_count() or 1) * IDLE_W * duration_s + (AVERAGE_W - IDLE_W) * busy_s
    return Row(loop_s, beside, ranks, metric.value, metric.uncertainty or 0.0, host_j, duration_s)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown, each with its ratio to the same loop without neighbours."""
    quiet = {(row.loop_s, row.ranks): row for row in rows if not row.neighbours}
    lines = [
        "|CPU s per rank|ranks|neighbours|wall s|truth J|estimate J|to truth|to quiet|whole host J|to quiet|",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        alone = quiet[row.loop_s, row.ranks]
        lines.append(
            f"|{row.loop_s:g}|{row.ranks or 'in process'}|{row.neighbours}|{row.duration_s:.2f}|"
            f"{row.truth_j:.3f}|{row.energy_j:.3f}|{row.energy_j / row.truth_j:.4f}|"
            f"{row.energy_j / alone.energy_j:.4f}|{row.host_j:.2f}|{row.host_j / alone.host_j:.2f}|"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loops", type=float, nargs="+", default=LOOPS_S)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for loop_s, ranks, beside in product(args.loops, RANKS, NEIGHBOURS):
        rows.append(make_row(loop_s, beside, ranks, args.rounds))
        print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
