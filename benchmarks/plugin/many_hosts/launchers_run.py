# SPDX-License-Identifier: Apache-2.0
"""Measure what a gang of two hosts costs below a real Slurm and a real Ray. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.hosts.ray_cluster import RayNodes
from tests.hosts.runs import CUDA_STAND_IN
from tests.hosts.slurm import Slurm
from tests.nvml_sim import build_library

ROOT = Path(__file__).resolve().parents[3]
SUITE = Path(__file__).parent / "suite"
RUN_TIMEOUT_S = 300
MS = 10**6

COLUMNS = {
    "where": "{}",
    "gang_s": "{:.2f}",
    "first_s": "{:.2f}",
    "warm_ms": "{:.1f}",
    "agent_cpu_percent": "{:.2f}",
}


@dataclass(frozen=True)
class Place:
    """Where pytest runs: the launcher's name, the command that starts pytest, and its environment."""

    name: str
    launcher: Sequence[str]
    environment: Mapping[str, str]
    hosts: int


@contextmanager
def open_places(scratch: Path) -> Iterator[list[Place]]:
    """Start both clusters, each of two hosts that are made of this machine."""
    library = build_library(scratch)
    (scratch / "ray").mkdir()
    (scratch / "slurm").mkdir()
    nodes = RayNodes(scratch / "ray", library)
    try:
        nodes.add(None, 4)
        nodes.add("nodeb", 4)
        with closing(Slurm(scratch / "slurm", library)) as slurm:
            on_ray = {**os.environ, **nodes.environment}
            # As a real board, which ticks ten times a second.
            for world in (*(host.world for host in nodes.hosts), *slurm.worlds.values()):
                for board in range(4):
                    world.update(board, latch_ns=100 * MS, latch_jitter_ns=0)
            job = ["salloc", "--quiet", "--nodes=2", "--gres=gpu:4"]
            yield [
                Place("local", (), on_ray, 1),
                Place("slurm", job, slurm.environment, 2),
                Place("ray", (), on_ray, 2),
            ]
    finally:
        nodes.stop()


def run_suite(place: Place, scratch: Path) -> dict[str, Any]:
    """Run the suite once; return its times (seconds) and the agents' processor time (per cent of a core)."""
    times, shares = scratch / "times.json", scratch / "shares.json"
    shares.unlink(missing_ok=True)
    variables = {
        **place.environment,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, CUDA_STAND_IN, SUITE))),
        "LLENERGY_TIMES": str(times),
        "LLENERGY_SHARES": str(shares),
        "LLENERGY_BENCH_PER_HOST": str(2 // place.hosts),
    }
    plugins = ["-p", "lease_times", "-p", "no:cacheprovider"]
    options = [f"--energy-cluster={place.name}", f"--energy-report={scratch / 'energy.json'}"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options, str(SUITE)]
    done = subprocess.run(
        [*place.launcher, *command],
        env=variables,
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{place.name}: {done.stdout}{done.stderr}")
    found = json.loads(times.read_text())

    def typical_s(test: str, what: str) -> float:
        return float(median(s for *each, s in found if each == [test, what]))

    return {
        "gang_s": typical_s("test_first", "lease"),
        "first_s": typical_s("test_first", "test"),
        "warm_ms": 1e3 * (typical_s("test_warm", "test") - typical_s("test_empty", "test")),
        "agent_cpu_percent": 100 * max(json.loads(shares.read_text())) if shares.exists() else 0.0,
    }


def main(argv: Sequence[str]) -> None:
    """Run the suite in each place alternately and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs in each place; 5")
    parser.add_argument("--json", type=Path, default=Path("launchers.json"), metavar="FILE")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="llenergy-") as name:
        scratch = Path(name)
        with open_places(scratch) as places:
            runs: dict[str, list[dict[str, Any]]] = {place.name: [] for place in places}
            for _ in range(args.repeats):
                for place in places:
                    runs[place.name].append(run_suite(place, scratch))
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for where, each in runs.items():
        row = {name: median(run[name] for run in each) for name in each[0]} | {"where": where}
        print(f"| {' | '.join(form.format(row[name]) for name, form in COLUMNS.items())} |")
    args.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
