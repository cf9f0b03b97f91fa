# SPDX-License-Identifier: Apache-2.0
"""Run ``llenergy ab`` on this machine's CPU: the same work twice (A/A), and a tenth more of it (A/B).

python benchmarks/plugin/ab/ab_run.py --repeats 10 --json ab.json --markdown ab.md
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_llenergy.report.store import read_paired_report

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

#: One thread, so that none waits by spinning.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

#: With a meter that counts only this work.
SESSION = (
    "pytest benchmarks/plugin/ab/suite/suite_decode.py -q -p no:cacheprovider --energy-backend=transformers "
    "--energy-warmup=1 --energy-budget=2 --energy-meter=session-cpu"
)

#: Tokens generated on each side.
CASES = {"A/A": (20, 20), "A/B": (20, 22)}


@dataclass(frozen=True)
class Outcome:
    """Result of one run of ``llenergy ab``.

    Ratio and limits are those of joules per iteration, head over baseline.
    """

    case: str
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    noise: float | None
    rounds: tuple[int, int]
    sessions: int
    minutes: float
    exit_code: int
    kind: str | None
    meter: str
    reason: str


def run_once(case: str, pairs: str, rounds: int, directory: Path, *, stand_in: bool) -> Outcome:
    """Run ``llenergy ab`` once. Raises ``SystemExit`` with its output if it reaches no verdict."""
    tokens = CASES[case]
    output = directory / "ab.json"
    words = [sys.executable, "-m", "pytest_llenergy.cli", "ab"]
    words += [f"--{side}=--new-tokens={count}" for side, count in zip("ab", tokens, strict=True)]
    words += [f"--pairs={pairs}", f"--rounds-per-session={rounds}", "--metric=energy_j", "--fresh"]
    words += ["--output", str(output), "--", *shlex.split(SESSION), *(["--stand-in"] if stand_in else [])]
    began_s = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    minutes = (time.monotonic() - began_s) / 60
    if not output.exists():
        raise SystemExit(f"{case}: exit code {done.returncode}\n{done.stderr}")
    paired = read_paired_report(output)
    output.unlink()
    (found,) = paired.compared.comparisons
    return Outcome(
        case=case,
        verdict=found.verdict,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        noise=found.noise,
        rounds=(found.n_base, found.n_head),
        sessions=len(paired.sessions),
        minutes=minutes,
        exit_code=done.returncode,
        kind=found.kind,
        meter=paired.head.records[0].meters[0].name,
        reason=found.reason,
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Render a row per run, and the count of each verdict."""
    lines = [
        "| case | verdict | head / base | limits | noise | rounds | sessions | minutes |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in outcomes:
        limits = "-" if each.low is None or each.high is None else f"{each.low:.4f} … {each.high:.4f}"
        cells = (
            each.case,
            each.verdict,
            "-" if each.ratio is None else f"{each.ratio:.4f}",
            limits,
            "-" if each.noise is None else f"{each.noise:.1%}",
            f"{each.rounds[0]} + {each.rounds[1]}",
            str(each.sessions),
            f"{each.minutes:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for case in dict.fromkeys(each.case for each in outcomes):
        counts = Counter(each.verdict for each in outcomes if each.case == case)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        meters = ", ".join(sorted({f"{each.meter}, {each.kind}" for each in outcomes if each.case == case}))
        lines.append(f"{case}: {verdicts}, of {sum(counts.values())} ({meters})")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pairs", default="6+6")
    parser.add_argument("--rounds-per-session", type=int, default=2)
    parser.add_argument("--stand-in", action="store_true", help="use made-up joules: 0.1 J per output token")
    parser.add_argument("--json", type=Path, default=Path("ab_run.json"))
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.repeats):
            for case in args.cases:
                directory = Path(scratch)
                each = run_once(case, args.pairs, args.rounds_per_session, directory, stand_in=args.stand_in)
                outcomes.append(each)
                print(outcomes[-1], flush=True)
                # Written after every run, so that an interruption loses nothing.
                args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
    table = markdown(outcomes)
    print(table)
    if args.markdown is not None:
        args.markdown.write_text(table)


if __name__ == "__main__":
    main()
