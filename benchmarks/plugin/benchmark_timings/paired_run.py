# SPDX-License-Identifier: Apache-2.0
"""Compare timings of pytest-benchmark with and without the plugin. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

SUITE, IN_TURN = (Path(__file__).with_name(name) for name in ("suite_timed.py", "in_turn.py"))
PLAIN, MEASURED = ("-p", "no:llenergy"), ("--energy-report=energy.json",)
SIDES = {"without": PLAIN, "with": MEASURED}
FIGURES = ("min", "median", "mean")

#: pytest-benchmark's time per test (seconds): short, so that the two sides run close together.
BENCHMARK_S = 0.1

#: Bootstrap resamples for the interval of a ratio.
RESAMPLES = 10_000


class Side:
    """A pytest process that runs one test at a time on request."""

    def __init__(self, side: str, turns: int, scratch: Path) -> None:
        self._side, self._out, self._log = side, scratch / f"{side}.json", scratch / f"{side}.txt"
        child_turn, self._turn = os.pipe()
        self._done, child_done = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "in_turn"]
        command += [f"--benchmark-max-time={BENCHMARK_S}", f"--benchmark-json={self._out}"]
        paths = os.pathsep.join(filter(None, (str(scratch), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "IN_TURN": f"{turns} {child_turn} {child_done}", "PYTHONPATH": paths}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *SIDES[side], SUITE.name],
                cwd=scratch,
                env=environment,
                pass_fds=(child_turn, child_done),
                stdout=log,
                stderr=log,
            )
        os.close(child_turn)
        os.close(child_done)

    def run_one(self) -> bool:
        """Run the next test. Returns False if there was none."""
        try:
            os.write(self._turn, b"\n")
        except BrokenPipeError:
            return False
        return bool(os.read(self._done, 1))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each benchmark and turn. Exits if the process failed."""
        if self._process.wait() != 0:
            raise SystemExit(f"pytest, {self._side} the plugin, failed:\n{self._log.read_text()[-4000:]}")
        found = json.loads(self._out.read_text())["benchmarks"]
        if SIDES[self._side] == MEASURED and not all("energy_kind" in each["extra_info"] for each in found):
            raise SystemExit(f"not every benchmark was measured:\n{self._log.read_text()[-4000:]}")
        return {each["name"]: each["stats"] for each in found}


@contextmanager
def keep_other_cpus_busy() -> Iterator[None]:
    """Keep all CPUs but one busy at the lowest priority.

    The clock of many machines follows their load, so the little work of the meters' reader on another CPU
    makes everything faster: a loop of nanoseconds by a tenth where this was written.
    """
    spin = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range((os.cpu_count() or 1) - 1)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def measure_ratios(turns: int, scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Return the ratio with over without the plugin, by benchmark and statistic, one value per turn.

    Two processes run all benchmarks; the side that goes first alternates.
    """
    sides = {side: Side(side, turns, scratch) for side in SIDES}
    order = list(sides.values())
    while all(each.run_one() for each in order):
        order.reverse()
    ratios: dict[str, dict[str, list[float]]] = {}
    seen = {side: running.stats() for side, running in sides.items()}
    for name, stats in seen["with"].items():
        row = ratios.setdefault(name.partition("[")[0], {figure: [] for figure in FIGURES})
        for figure in FIGURES:
            row[figure].append(stats[figure] / seen["without"][name][figure])
    return ratios


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    random = Random(0)
    drawn = sorted(median(random.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]


def markdown(content: dict[str, Any]) -> str:
    """Render the table."""
    lines = [
        f"| benchmark | {' | '.join(f'{figure}, with / without' for figure in FIGURES)} |",
        f"| --- |{' ---: |' * len(FIGURES)}",
    ]
    rows = {**content["ratios"], "**all**": content["all"]}
    for name, row in rows.items():
        cells = []
        for figure in FIGURES:
            low, high = bootstrap_interval(row[figure])
            cells.append(f"{median(row[figure]):.4f} ({low:.4f} to {high:.4f})")
        lines.append(f"| {name.removeprefix('test_').replace('_', ' ')} | {' | '.join(cells)} |")
    pairs = len(content["all"][FIGURES[0]])
    lines += ["", f"{pairs} pairs of processes; medians with 95 % bootstrap intervals over pairs."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, metavar="N", help="pairs of processes (8)")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="turns per benchmark (8)")
    parser.add_argument(
        "--alike", action="store_true", help="run both sides without the plugin, to show the resolution"
    )
    parser.add_argument("--json", type=Path, default=Path("paired.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args(argv)
    if args.alike:
        SIDES["with"] = PLAIN
    ratios: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="paired-") as name, keep_other_cpus_busy():
        scratch = Path(name)
        os.environ["LLENERGY_LOCK_DIR"] = name
        # Outside this repository, so that its pytest options do not apply.
        for file in (SUITE, IN_TURN):
            shutil.copy(file, scratch)
        (scratch / "pytest.ini").write_text("[pytest]\n")
        for pair in range(args.pairs):
            for benchmark, row in measure_ratios(args.turns, scratch).items():
                for figure, values in row.items():
                    ratios.setdefault(benchmark, {}).setdefault(figure, []).append(median(values))
            print(f"  pair {pair + 1} of {args.pairs}", flush=True)
    # One value per pair, the median over the benchmarks, for effects that all of them share.
    common = {
        figure: [median(values) for values in zip(*(row[figure] for row in ratios.values()), strict=True)]
        for figure in FIGURES
    }
    content: dict[str, Any] = {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "pytest-benchmark": version("pytest-benchmark"),
        "ratios": ratios,
        "all": common,
    }
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    table = markdown(content)
    print(f"\n{table}")
    if args.markdown:
        args.markdown.write_text(table)


if __name__ == "__main__":
    main(sys.argv[1:])
