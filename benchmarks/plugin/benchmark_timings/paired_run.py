# SPDX-License-Identifier: Apache-2.0
"""Are timings of pytest-benchmark the same where its tests are measured? See the README beside this file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

SUITE = Path(__file__).with_name("suite_timed.py")
SIDES = {"without": ("-p", "no:llenergy"), "with": ("--energy-report=energy.json",)}
FIGURES = ("min", "median", "mean")

#: Drawings for the interval of a ratio.
DRAWINGS = 10_000


def run(side: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """The statistics of each benchmark, in a fresh process. Ends the comparison if it fails."""
    out = scratch / "out.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--benchmark-json={out}", *SIDES[side], SUITE.name]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    found = json.loads(out.read_text())["benchmarks"]
    if side == "with" and not all(each["extra_info"].get("energy_j") for each in found):
        raise SystemExit(f"not every benchmark was measured:\n{done.stdout[-4000:]}")
    return {each["name"]: each["stats"] for each in found}


def paired(pairs: int, scratch: Path) -> dict[str, dict[str, list[float]]]:
    """With over without, by benchmark and figure, a value for each pair. Who is first changes."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for number in range(pairs):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        seen = {side: run(side, scratch) for side in order}
        for name, stats in seen["with"].items():
            row = ratios.setdefault(name, {figure: [] for figure in FIGURES})
            for figure in FIGURES:
                row[figure].append(stats[figure] / seen["without"][name][figure])
        print(f"  pair {number + 1} of {pairs}", flush=True)
    return ratios


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of values drawn again (bootstrap)."""
    random = Random(0)
    drawn = sorted(median(random.choices(values, k=len(values))) for _ in range(DRAWINGS))
    return drawn[round(0.025 * DRAWINGS)], drawn[round(0.975 * DRAWINGS) - 1]


def markdown(content: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"| benchmark | {' | '.join(f'{figure}, with over without' for figure in FIGURES)} |",
        f"| --- |{' ---: |' * len(FIGURES)}",
    ]
    rows = {**content["ratios"], "**all**": content["all"]}
    for name, row in rows.items():
        cells = []
        for figure in FIGURES:
            low, high = interval(row[figure])
            cells.append(f"{median(row[figure]):.4f} ({low:.4f} to {high:.4f})")
        lines.append(f"| {name.removeprefix('test_').replace('_', ' ')} | {' | '.join(cells)} |")
    pairs = len(content["all"][FIGURES[0]])
    lines += ["", f"{pairs} pairs of runs; medians, and 95 % of them when pairs are drawn again."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=16, metavar="N", help="pairs of runs (16)")
    parser.add_argument("--json", type=Path, default=Path("paired.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="paired-") as scratch:
        os.environ["LLENERGY_LOCK_DIR"] = scratch
        # Far from this repository's own options.
        shutil.copy(SUITE, scratch)
        (Path(scratch) / "pytest.ini").write_text("[pytest]\n")
        ratios = paired(given.pairs, Path(scratch))
    # Of each pair the median over the benchmarks: what is common to all of them.
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
    given.json.write_text(json.dumps(content, indent=1) + "\n")
    table = markdown(content)
    print(f"\n{table}")
    if given.markdown:
        given.markdown.write_text(table)


if __name__ == "__main__":
    main(sys.argv[1:])
