# SPDX-License-Identifier: Apache-2.0
"""Judge sessions of a public pytest-benchmark suite from their JSON. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark_timings"))
from public_suites import SUITES, PublicSuite, fetch

#: A timer that runs faster makes every benchmark seem slower by as much, whatever it executes.
SLOW_TIMER = "import time\n\n\ndef slow():\n    return {factor} * time.perf_counter()\n"

#: Sessions of each side that are judged together.
SIDES = (1, 4, 10)

Group = Sequence[Path]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="python-rapidjson")
    parser.add_argument(
        "--sessions", type=int, default=20, metavar="N", help="sessions of the same code (20)"
    )
    parser.add_argument("--worse", type=int, default=10, metavar="N", help="sessions of worse code (10)")
    parser.add_argument("--factor", type=float, default=1.1, help="how much worse (1.1)")
    parser.add_argument("--max-time", default="0.1", metavar="S", help="seconds of each benchmark (0.1)")
    parser.add_argument("--only", metavar="WORDS", help="pytest's -k")
    parser.add_argument("--installed", action="store_true", help="the suite's packages are installed already")
    parser.add_argument(
        "--folder", type=Path, default=Path("sessions"), help="for the JSON; existing is used"
    )
    return parser.parse_args(argv)


def run_sessions(suite: PublicSuite, args: argparse.Namespace) -> None:
    """Run the sessions that the folder lacks; worse ones are spread over the others."""
    every = max(1, args.sessions // max(1, args.worse))
    kinds = [(f"same-{number:02}", False) for number in range(args.sessions)]
    for number in range(args.worse):
        kinds.insert(min((every + 1) * number + 1, len(kinds)), (f"worse-{number:02}", True))
    missing = [(name, worse) for name, worse in kinds if not (args.folder / f"{name}.json").exists()]
    if not missing:
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="suite-") as name:
        scratch = Path(name)
        (scratch / "pytest.ini").write_text("[pytest]\n")
        (scratch / "slow_timer.py").write_text(SLOW_TIMER.format(factor=args.factor))
        tree = fetch(suite, scratch, add=not args.installed)
        for session, worse in missing:
            out = args.folder.resolve() / f"{session}.json"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:llenergy"]
            command += ["-c", str(scratch / "pytest.ini"), f"--rootdir={tree}", f"--benchmark-json={out}"]
            command += [f"--benchmark-max-time={args.max_time}", *suite.arguments]
            command += ["--benchmark-timer=slow_timer.slow"] if worse else []
            command += ["-k", args.only] if args.only else []
            paths = os.pathsep.join([str(scratch), str(scratch / "site"), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                command,
                cwd=tree / suite.folder,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
            )
            if not out.exists():
                raise SystemExit(done.stdout[-3000:] + done.stderr)
            print(f"{session}: {done.stdout.splitlines()[-1]}", flush=True)


def list_groups(same: Group, worse: Group, count: int) -> Iterator[tuple[str, Group, Group]]:
    """Yield sides of ``count`` sessions each: both of the same code, in turn, or one of worse code."""
    for start in range(0, len(same) - 2 * count + 1, 2 * count):
        both = same[start : start + 2 * count]
        yield "same", both[::2], both[1::2]
    for start in range(0, len(worse) - count + 1, count):
        # The sessions of the same code that ran next to the worse ones.
        yield "worse", same[2 * start : 2 * (start + count) : 2], worse[start : start + count]


def judge_means(base: Group, head: Group) -> list[str]:
    """Return the verdicts of pytest-benchmark's ``mean:5%``, on the mean of the sessions' means."""
    sides = []
    for group in (base, head):
        means: dict[str, list[float]] = {}
        for path in group:
            for each in json.loads(path.read_text())["benchmarks"]:
                means.setdefault(each["fullname"], []).append(each["stats"]["mean"])
        sides.append({name: fmean(values) for name, values in means.items()})
    return ["regressed" if sides[1][name] > 1.05 * mean else "unchanged" for name, mean in sides[0].items()]


def judge(base: Group, head: Group) -> list[str]:
    """Return the verdicts of ``llenergy compare``."""
    with tempfile.TemporaryDirectory() as name:
        paths = []
        for side, group in (("base", base), ("head", head)):
            folder = Path(name) / side
            folder.mkdir()
            for path in group:
                (folder / path.name).symlink_to(path.resolve())
            paths.append(str(folder if len(group) > 1 else path.resolve()))
        command = [sys.executable, "-m", "pytest_llenergy.cli", "compare", *paths, "--format=json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if not done.stdout:
            raise SystemExit(done.stderr)
        comparisons: list[dict[str, Any]] = json.loads(done.stdout)["comparisons"]
        return [each["verdict"] for each in comparisons]


def main(argv: Sequence[str]) -> None:
    """Run what is missing, judge all, print the table."""
    args = parse_arguments(argv)
    run_sessions(SUITES[args.suite], args)
    same, worse = (sorted(args.folder.glob(f"{kind}-*.json")) for kind in ("same", "worse"))
    print("|rule|sessions a side|code|verdicts|regressed|inconclusive|other|")
    print("|---|---:|---|---:|---:|---:|---|")
    for count in SIDES:
        found: dict[tuple[str, str], Counter[str]] = {}
        for kind, base, head in list_groups(same, worse, count):
            for rule, verdicts in (("mean:5%", judge_means(base, head)), ("ours", judge(base, head))):
                found.setdefault((rule, kind), Counter()).update(verdicts)
        for (rule, kind), counts in sorted(found.items()):
            total = counts.total()
            shares = [f"{counts.pop(verdict, 0) / total:.1%}" for verdict in ("regressed", "inconclusive")]
            rest = ", ".join(f"{each} {number / total:.1%}" for each, number in counts.most_common())
            print(f"|{rule}|{count}|{kind}|{total}|{'|'.join(shares)}|{rest}|")


if __name__ == "__main__":
    main(sys.argv[1:])
