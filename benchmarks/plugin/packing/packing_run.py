# SPDX-License-Identifier: Apache-2.0
"""Measure how well leases pack tests onto boards. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from packing_suite import (
    BOARDS,
    draw_suite,
    ideal_queue_s,
    lower_bound_s,
    makespan_s,
    read_spans,
    write_suite,
)

from tests.nvml_sim import Board, World, build_library

ROOT = Path(__file__).resolve().parents[3]

#: Highest acceptable median of makespan over lower bound.
MAX_RATIO = 1.25

OURS, ONE_LOCK = "leases", "one lock"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", type=int, default=5, metavar="N", help="random suites (5)")
    parser.add_argument("--tests", type=int, default=60, metavar="N", help="tests in each (60)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="as in pytest -n (8)")
    parser.add_argument("--seconds", type=float, nargs=2, default=(0.2, 0.6), metavar=("LEAST", "MOST"))
    parser.add_argument("--models", type=int, default=1, metavar="N", help="models among the 8 boards (1)")
    parser.add_argument("--widest", type=int, default=8, metavar="N", help="most boards of a test (8)")
    parser.add_argument("--widest-first", action="store_true", help="tests with the most boards first")
    parser.add_argument("--leases-only", action="store_true", help="leave out the lock for all tests")
    parser.add_argument("--dist", default="load", help="as in pytest --dist (load)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("packing.json"), metavar="FILE")
    return parser.parse_args(argv)


def run_pytest(directory: Path, environment: dict[str, str], workers: int, dist: str) -> None:
    """Run one pytest session. Exits if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}"]
    # The plugin schedules the tests of a run that keeps energy.
    command.append("--energy-report")
    done = subprocess.run(
        [*command, f"--dist={dist}", "-o", "addopts="],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"pytest failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")


def main(argv: Sequence[str]) -> int:
    """Run every suite both ways and print the table. Returns 1 if the limit is exceeded."""
    args = parse_arguments(argv)
    rng = Random(args.seed)
    rows: list[dict[str, Any]] = []
    names = (OURS,) if args.leases_only else (OURS, ONE_LOCK)
    with tempfile.TemporaryDirectory(prefix="packing-") as scratch_name:
        scratch = Path(scratch_name)
        boards = [Board(name=f"NVIDIA {index * args.models // BOARDS}") for index in range(BOARDS)]
        world = World(scratch / "world", boards)
        (scratch / "locks").mkdir()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CUDA_")},
            **world.environment(build_library(scratch / "library").parent),
            "PYTHONPATH": str(ROOT),
            "LLENERGY_LOCK_DIR": str(scratch / "locks"),
        }
        for index in range(args.suites):
            jobs = draw_suite(rng, args.tests, args.widest, *args.seconds)
            if args.widest_first:
                jobs.sort(key=lambda job: -job.n)
            bound_s = lower_bound_s(jobs, args.workers)
            ideal_s = ideal_queue_s(jobs, args.workers, args.models)
            row: dict[str, Any] = {"bound_s": bound_s, "ideal_s": ideal_s, "load_average": os.getloadavg()[0]}
            # Alternate, since the load of the machine changes slowly.
            for name in names if index % 2 == 0 else names[::-1]:
                directory = scratch / f"{index}-{name.replace(' ', '-')}"
                directory.mkdir()
                log = write_suite(jobs, directory, leases=name == OURS)
                run_pytest(directory, environment, args.workers, args.dist)
                spans = read_spans(log)
                assert len(spans) == args.tests
                row[name] = {"makespan_s": makespan_s(spans), "ratio": makespan_s(spans) / bound_s}
            rows.append(row)
            print(f"  suite {index}: " + _cells(row), flush=True)
    ratios = {name: median(row[name]["ratio"] for row in rows) for name in names}
    print("\nmakespan over the lower bound, median: ", end="")
    print(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), f"(limit: {MAX_RATIO})")
    over_ideal = median(row[OURS]["makespan_s"] / row["ideal_s"] for row in rows)
    print(f"makespan over the same queue without costs, median: {OURS} {over_ideal:.2f}")
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    host = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    content = {"host": host, "settings": settings, "ratios": ratios, "suites": rows}
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if ratios[OURS] <= MAX_RATIO else 1


def _cells(row: dict[str, Any]) -> str:
    found = [name for name in (OURS, ONE_LOCK) if name in row]
    cells = [f"{name} {row[name]['makespan_s']:.2f} s ({row[name]['ratio']:.2f})" for name in found]
    return f"bound {row['bound_s']:.2f} s, without costs {row['ideal_s']:.2f} s, {', '.join(cells)}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
