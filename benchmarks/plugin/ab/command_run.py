# SPDX-License-Identifier: Apache-2.0
"""Compare a shell command with itself (A/A) and with a tenth more of it, by ``llenergy ab``, quiet and busy.

python benchmarks/plugin/ab/command_run.py --repeats 10 --json command.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from busy_run import neighbours

from pytest_llenergy.report.store import read_paired_report

#: The work in shell, its size, and the meter. The first has made energy: ten watts whatever happens.
WORKS = {
    "made": ("sleep {0}", 0.5, "command:sh -c 'while :; do echo 10; sleep 0.02; done'"),
    "loop": ('{python} -c "sum(i * i for i in range(int({0} * 1e6)))"', 8.0, "estimate"),
}
CHANGES = {"A/A": 1.0, "+10 %": 1.1}


@dataclass(frozen=True)
class Row:
    """One comparison; ``load`` is the load average of the machine after it."""

    work: str
    change: str
    neighbours: int
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    kind: str | None
    seconds: float
    load: float


def compare(work: str, change: str, busy: int, pairs: str, scratch: Path) -> Row:
    """Run ``llenergy ab`` once. Raises ``SystemExit`` with its output if it reaches no verdict."""
    template, size, meter = WORKS[work]
    output = scratch / "ab.json"
    sides = [template.format(each, python=sys.executable) for each in (size, size * CHANGES[change])]
    words = [sys.executable, "-m", "pytest_llenergy.cli", "ab", f"--a={sides[0]}", f"--b={sides[1]}"]
    words += ["--fresh", f"--meter={meter}", *([f"--pairs={pairs}"] if pairs else []), f"--output={output}"]
    began_s = time.monotonic()
    done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, check=False)
    if not output.exists():
        raise SystemExit(f"llenergy ab: exit code {done.returncode}\n{done.stderr}")
    (found,) = read_paired_report(output).compared.comparisons
    output.unlink()
    seconds, load = time.monotonic() - began_s, os.getloadavg()[0]
    limits = found.ratio, found.low, found.high
    return Row(work, change, busy, found.verdict, *limits, found.n_head, found.kind, seconds, load)


def table(rows: list[Row]) -> str:
    """Return the verdicts of each case, in Markdown."""
    lines = ["|command|change|busy neighbours|verdicts|head / base|pairs|median time|"]
    lines.append("|---|---|---:|---|---:|---:|---:|")
    for key in dict.fromkeys((row.work, row.change, row.neighbours) for row in rows):
        same = [row for row in rows if (row.work, row.change, row.neighbours) == key]
        verdicts = sorted({row.verdict for row in same})
        counts = ", ".join(f"{sum(row.verdict == each for row in same)} {each}" for each in verdicts)
        ratios = sorted(row.ratio for row in same if row.ratio is not None) or [float("nan")]
        pairs = sorted(row.pairs for row in same)
        seconds = sorted(row.seconds for row in same)[len(same) // 2]
        cells = (
            f"{key[0]} ({same[0].kind})",
            key[1],
            str(key[2]),
            f"{counts}, of {len(same)}",
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            f"{pairs[0]} to {pairs[-1]}",
            f"{seconds:.0f} s",
        )
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def main() -> None:
    """Run every case in turn and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--pairs", default="", help="those of llenergy ab by default")
    parser.add_argument("--json", type=Path, default=Path("command_run.json"))
    args = parser.parse_args()
    # Otherwise the neighbours would go on for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for busy in args.neighbours:
            with neighbours(busy) if busy else nullcontext():
                for _, work, change in product(range(args.repeats), args.works, args.changes):
                    rows.append(compare(work, change, busy, args.pairs, Path(scratch)))
                    print(rows[-1], file=sys.stderr, flush=True)
                    # Written after every run, so that an interruption loses nothing.
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
