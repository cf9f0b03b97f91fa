# SPDX-License-Identifier: Apache-2.0
"""Find a known change beside a busy process on every core, with ``llenergy ab`` and two other tools.

python benchmarks/plugin/ab/busy_run.py --repeats 10 --json busy.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import METERS, peer_python

from pytest_llenergy.report.store import read_paired_report

HERE = Path(__file__).resolve().parent / "busy"
CHANGES = {"A/A": 1.0, "+10 %": 1.1, "+30 %": 1.3}

#: A change above this fails, where the tool has no rule itself, and in pytest-benchmark's ``mean:5%``.
THRESHOLD = 0.05

#: Calls of the work in one measurement by CodeCarbon.
CALLS = 10


@dataclass(frozen=True)
class Row:
    """One tool that compared the work with itself or with more of it. ``red``: it reported a regression."""

    work: str
    change: str
    tool: str
    red: bool
    verdict: str
    ratio: float | None
    seconds: float
    load: float


@contextmanager
def neighbours(n: int) -> Iterator[None]:
    """Keep so many cores busy with processes that are not descendants of this one."""
    command = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    pids = [int(subprocess.check_output(["sh", "-c", command])) for _ in range(n)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, 9)


#: Of ``llenergy ab``, which otherwise uses those of its own.
PAIRS: list[str] = []


def run_ab(work: str, size: float, scratch: Path) -> tuple[str, float | None, bool]:
    """Return verdict, ratio and whether ``llenergy ab`` is red."""
    output = scratch / "ab.json"
    words = [sys.executable, "-m", "pytest_llenergy.cli", "ab", "--a=--size=1.0", f"--b=--size={size}"]
    words += ["--fresh", "--metric=energy_j", *PAIRS, "--output", str(output), "--"]
    words += ["pytest", str(HERE / "suite_energy.py"), f"--work={work}", "-q", "-p", "busy_options"]
    words += ["-p", "no:cacheprovider"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=HERE, env=_environment(), check=False)
    if not output.exists():
        raise SystemExit(f"llenergy ab: exit code {done.returncode}\n{done.stderr}")
    (found,) = read_paired_report(output).compared.comparisons
    output.unlink()
    if found.ratio is None:
        print(found.reason, file=sys.stderr)
    return found.verdict, found.ratio, found.verdict == "regressed"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


def run_codecarbon(work: str, size: float, scratch: Path) -> tuple[str, float | None, bool]:
    """Return the ratio of energies by CodeCarbon's process mode, red above the threshold."""
    python = str(peer_python(METERS))
    packages = sysconfig.get_paths()["purelib"] if work == "loop" else _packages_of("xllamacpp")
    words = [python, str(HERE / "carbon.py"), work]
    printed = [
        subprocess.check_output(
            [*words, str(each), str(CALLS), packages], cwd=scratch, text=True, stderr=subprocess.DEVNULL
        )
        for each in (1.0, size)
    ]
    # Libraries that it does not find are printed before.
    joules = [float(each.splitlines()[-1]) for each in printed]
    ratio = joules[1] / joules[0]
    return f"{ratio - 1:+.0%}", ratio, ratio > 1 + THRESHOLD


def _packages_of(name: str) -> str:
    module = __import__(name)
    return str(Path(module.__file__ or "").parents[1])


def run_benchmark(work: str, size: float, scratch: Path) -> tuple[str, float | None, bool]:
    """Return whether pytest-benchmark fails by ``--benchmark-compare-fail=mean:5%``."""
    storage = Path(tempfile.mkdtemp(dir=scratch))
    words = [sys.executable, "-m", "pytest", str(HERE / "suite_benchmark.py"), f"--work={work}", "-q"]
    # This repository's own settings are unknown without the plugin.
    words += ["-c", os.devnull, "-p", "busy_options", "-p", "no:llenergy", "-p", "no:cacheprovider"]
    words += [f"--benchmark-storage={storage}"]
    fail = ["--benchmark-compare", f"--benchmark-compare-fail=mean:{THRESHOLD:.0%}"]
    sides = [["--benchmark-save=a"], ["--benchmark-save=b", *fail, f"--size={size}"]]
    done = [
        subprocess.run([*words, *side], capture_output=True, text=True, env=_environment(), check=False)
        for side in sides
    ]
    means = [
        json.loads(each.read_text())["benchmarks"][0]["stats"]["mean"]
        for each in sorted(storage.rglob("*.json"))
    ]
    if done[0].returncode or len(means) != len(sides):
        raise SystemExit(f"pytest-benchmark: {done[0].stdout}{done[-1].stdout}{done[-1].stderr}")
    ratio = means[1] / means[0]
    return f"{ratio - 1:+.0%}", ratio, done[1].returncode != 0


TOOLS: dict[str, Callable[[str, float, Path], tuple[str, float | None, bool]]] = {
    "llenergy ab": run_ab,
    "CodeCarbon, process mode": run_codecarbon,
    "pytest-benchmark, mean:5%": run_benchmark,
}


def table(rows: Sequence[Row]) -> str:
    """Return how often each tool was red, in Markdown."""
    lines = ["|work|change|tool|red|verdicts|ratio|median time|", "|---|---|---|---:|---|---:|---:|"]
    for key in dict.fromkeys((row.work, row.change, row.tool) for row in rows):
        same = [row for row in rows if (row.work, row.change, row.tool) == key]
        verdicts = sorted({row.verdict for row in same}) if key[2] == "llenergy ab" else []
        counts = ", ".join(f"{sum(row.verdict == each for row in same)} {each}" for each in verdicts)
        ratios = sorted(row.ratio for row in same if row.ratio is not None)
        shown = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "-"
        seconds = sorted(row.seconds for row in same)[len(same) // 2]
        red = f"{sum(row.red for row in same)} of {len(same)}"
        lines.append(f"|{'|'.join(key)}|{red}|{counts or '-'}|{shown}|{seconds:.0f} s|")
    return "\n".join(lines)


def main() -> None:
    """Run every tool on every change and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--works", nargs="+", choices=("loop", "decode"), default=["loop", "decode"])
    parser.add_argument("--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--neighbours", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pairs", help="those of llenergy ab by default")
    parser.add_argument("--json", type=Path, default=Path("busy_run.json"))
    args = parser.parse_args()
    PAIRS[:] = [f"--pairs={args.pairs}"] if args.pairs else []
    # Otherwise the neighbours would go on for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, neighbours(args.neighbours):
        for _, work, change, tool in product(range(args.repeats), args.works, args.changes, args.tools):
            began_s = time.monotonic()
            verdict, ratio, red = TOOLS[tool](work, CHANGES[change], Path(scratch))
            seconds, load = time.monotonic() - began_s, os.getloadavg()[0]
            rows.append(Row(work, change, tool, red, verdict, ratio, seconds, load))
            print(rows[-1], file=sys.stderr, flush=True)
            # Written after every run, so that an interruption loses nothing.
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
