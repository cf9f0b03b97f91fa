# SPDX-License-Identifier: Apache-2.0
"""Check windows, loops, rounds, phases and metrics in worlds of exactly known energy, in real time.

Each world is a simulated board or eight (``stand_in_worlds.py``), read through pynvml by the plugin's reader.
See the README.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stand_in import cpu_seconds, make_environment, other_cores
from stand_in_worlds import WORLDS

from tests.nvml_sim import build_library

HERE = Path(__file__).resolve().parent

KINDS = ("windows", "loops", "rounds", "prefill", "decode", "metrics")

#: Promised share of numbers within two standard uncertainties, and largest bias in standard uncertainties.
COVERED, BIAS = 0.95, 0.2

#: Errors above this many standard uncertainties are no chance.
FAR = 5.0

#: A cell misses a promise if chance would do so less often than this.
CHANCE = 0.01

#: Standard deviations that chance exceeds as seldom.
SURE = 2.6

#: Flags that say nothing about errors of a number: about the host of this benchmark, and about its precision.
NO_WARNING = {"contended", "gpu-processes", "imprecise"}

#: Number of threads of numpy, which would disturb the readers of other processes.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Result = dict[str, Any]
Figures = dict[str, Any]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=WORLDS, metavar="WORLD", help="a world; repeatable"
    )
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="processes per world (4)")
    parser.add_argument("--jobs", type=int, default=14, metavar="N", help="processes at a time (14)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of lengths and faults (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result with its truth")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to FILE too")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="print the tables of an earlier run")
    return parser.parse_args(argv)


def run_workers(worlds: Iterable[str], repeats: int, jobs: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Measure each world in several processes, which mostly sleep."""
    with tempfile.TemporaryDirectory(prefix="stand-in-") as directory:
        scratch = Path(directory)
        library = build_library(scratch / "library")

        def measure(task: tuple[int, str]) -> tuple[str, dict[str, Any]]:
            repeat, world = task
            out = scratch / f"{list(WORLDS).index(world)}-{repeat}"
            out.mkdir()
            script = str(HERE / "stand_in_worker.py")
            command = [sys.executable, script, world, str(library), str(out), f"{world} {seed} {repeat}"]
            environment = make_environment(out, library) | dict.fromkeys(THREADS, "1")
            done = subprocess.run(command, env=environment, cwd=out, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{world}: {done.stderr[-4000:]}")
            return world, json.loads((out / "results.json").read_text())

        tasks = [(repeat, world) for repeat in range(repeats) for world in worlds]
        found: dict[str, list[dict[str, Any]]] = {}
        with ThreadPoolExecutor(jobs) as pool:
            for number, (world, parts) in enumerate(pool.map(measure, tasks), 1):
                found.setdefault(world, []).append(parts)
                print(f"{number} of {len(tasks)}: {world}", file=sys.stderr, flush=True)
    return found


def collect_results(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Result]]:
    """Return the results of one world by kind.

    The truth of a metric is what the usual lengths draw, and what the rounds drew beyond their random lengths
    on average: the wake-up of a sleep comes late, power falls slowly, a neighbour draws power.
    """
    found: dict[str, list[Result]] = {kind: [] for kind in KINDS}
    for number, part in enumerate(parts):
        for result in part["results"]:
            # Windows of a loop are solved together.
            alike = result["what"] if result["kind"] == "loops" else result["start_ns"]
            # An error of prefill is one of decode, with the other sign.
            kind = result["what"] if result["kind"] == "phases" else result["kind"]
            found[kind].append({**result, "group": (number, alike)})
    tests = [test for part in parts for test in part["tests"]]
    measured = [test for test in tests if "metrics" in test]
    for number, test in enumerate(measured):
        for metric in test["metrics"]:
            beyond_j = fmean(each for one in measured for each in one["beyond_j"][metric["what"]])
            true_j = metric["usual_j"] + beyond_j
            found["metrics"].append({**metric, "true_j": true_j, "invalid": None, "group": number})
    for test in tests:
        if "raised" in test:
            found["metrics"].append(
                {"what": "test", "energy_j": None, "reason": test["raised"], "group": None}
            )
    return found


def compute_figures(results: Sequence[Result]) -> Figures:
    """Return the figures of one cell. An invalid number is no result."""
    whys = [each.get("invalid") or (each["reason"] if each["energy_j"] is None else None) for each in results]
    reasons = Counter(shorten(why) for why in whys if why is not None)
    valid = [each for each, why in zip(results, whys, strict=True) if why is None]
    figures: Figures = {"n": len(results), "numbers": len(valid), "reasons": dict(reasons.most_common(3))}
    scored = [each for each in valid if each["u_j"]]
    if not scored:
        return figures
    scores = [(each["energy_j"] - each["true_j"]) / each["u_j"] for each in scored]
    both = list(zip(scored, scores, strict=True))
    silent = [(each, score) for each, score in both if not set(each["flags"]) - NO_WARNING]
    means = [fmean(some) for some in group_scores(both)]
    blur = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return {
        **figures,
        "scored": len(scored),
        "groups": len(means),
        "within_2u": share_within(both),
        "bias_u": fmean(scores),
        "median_u": median(map(abs, scores)),
        "worst_u": max(map(abs, scores)),
        "median_error": median(abs(each["energy_j"] / each["true_j"] - 1) for each in scored),
        "flagged": len(scored) - len(silent),
        "unflagged": len(silent),
        "unflagged_within_2u": share_within(silent) if silent else None,
        "unflagged_far": sum(abs(score) > FAR for _, score in silent),
        "too_few_within": has_too_few(both),
        "silently_wrong": has_too_few(silent),
        "bias_blur_u": blur,
        "biased": abs(fmean(means)) - SURE * blur > BIAS,
    }


Scored = Sequence[tuple[Result, float]]


def group_scores(scored: Scored) -> list[list[float]]:
    """Return the errors in standard uncertainties, those that belong together in one list."""
    groups: dict[Any, list[float]] = {}
    for each, score in scored:
        groups.setdefault(each["group"], []).append(score)
    return list(groups.values())


def share_within(scored: Scored) -> float:
    """Return the share within two standard uncertainties."""
    return fmean(abs(score) <= 2 for _, score in scored)


def has_too_few(scored: Scored) -> bool:
    """Return whether so few are within two uncertainties that it is unlikely to be chance.

    Those that belong together count once, by their share.
    """
    groups = group_scores(scored)
    n, within = len(groups), round(sum(fmean(abs(score) <= 2 for score in some) for some in groups))
    return sum(math.comb(n, k) * COVERED**k * (1 - COVERED) ** (n - k) for k in range(within + 1)) < CHANCE


def shorten(reason: str) -> str:
    """Return a reason without what differs from result to result."""
    text = re.sub(r"(gpu:)?GPU-[0-9a-f-]+", "GPU", reason)
    text = re.sub(r"^\d+ of \d+ rounds: ", "", text)
    return re.sub(r"-?\d[\d.,]*", "N", text)


def markdown(found: Mapping[str, Mapping[str, Figures]]) -> str:
    """Render how right the numbers are, and how many results have none."""
    head = f"|world|{'|'.join(KINDS)}|"
    rule = f"|---|{'---:|' * len(KINDS)}"
    right = [
        head,
        rule,
        *(f"|{name}|{'|'.join(_right(row[kind]) for kind in KINDS)}|" for name, row in found.items()),
    ]
    null = [f"{head}most frequent reason|", f"{rule}---|"]
    for name, row in found.items():
        reasons = Counter[str]()
        for each in row.values():
            reasons.update(each["reasons"])
        most = next((reason for reason, _ in reasons.most_common(1)), "")
        null.append(f"|{name}|{'|'.join(_null(row[kind]) for kind in KINDS)}|{most}|")
    parts = [
        "Share of the numbers within 2u, mean error/u, median |error|/u (**bold**: below 95 %, or biased by "
        "more than 0.2 u; *!*: below 95 % without a flag; *far*: numbers without a flag that are off by more "
        "than 5u):",
        "\n".join(right),
        "Share of results without a number, and share of the numbers with a flag:",
        "\n".join(null),
    ]
    return "\n\n".join(parts) + "\n"


def _right(each: Figures) -> str:
    if not each["n"]:
        return "-"
    if "within_2u" not in each:
        return "no number"
    share = f"{each['within_2u']:.0%}"
    share = f"**{share}**" if each["too_few_within"] else share
    bias = f"**{each['bias_u']:+.2f}**" if each["biased"] else f"{each['bias_u']:+.2f}"
    silent = " *!*" if each["silently_wrong"] else ""
    far = f" (*{each['unflagged_far']} far*)" if each["unflagged_far"] else ""
    return f"{share}{silent}{far}, {bias}, {each['median_u']:.2f}"


def _null(each: Figures) -> str:
    if not each["n"]:
        return "-"
    none = f"{1 - each['numbers'] / each['n']:.0%}"
    return f"{none}, {each['flagged'] / each['scored']:.0%}" if each.get("scored") else none


def main(argv: Sequence[str]) -> None:
    """Measure the worlds, print the tables, write the files."""
    args = parse_arguments(argv)
    if args.from_json is not None:
        content = json.loads(args.from_json.read_text())
    else:
        before, begin_s = cpu_seconds(), time.monotonic()
        parts = run_workers(args.only or WORLDS, args.repeats, args.jobs, args.seed)
        wall_s = time.monotonic() - begin_s
        content = {
            "seed": args.seed,
            "repeats": args.repeats,
            "jobs": args.jobs,
            "host": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "wall_s": wall_s,
            "cores_others_used": other_cores(before, wall_s),
            "parts": {world: parts[world] for world in WORLDS if world in parts},
        }
    found = {
        world: {kind: compute_figures(results) for kind, results in collect_results(parts).items()}
        for world, parts in content["parts"].items()
    }
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found, **content}, indent=1) + "\n")
    tables = markdown(found)
    others = f"other processes used {content['cores_others_used']:.2f} cores"
    print(f"\n{tables}\n{content['wall_s']:.0f} s; {others}")
    if args.markdown is not None:
        args.markdown.write_text(tables)


if __name__ == "__main__":
    main(sys.argv[1:])
