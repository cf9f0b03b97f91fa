# SPDX-License-Identifier: Apache-2.0
"""Compare a backend under the plugin with a plain script: answers and speed. See the README here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median, stdev
from typing import Any

from by_hand import BACKENDS, SERVER
from speed_setting import NEW_TOKENS, PROMPTS, REPEATS, WARM_UP

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.onnxruntime import onnx_directory

HERE = Path(__file__).parent
RESAMPLES = 2000


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--backends", nargs="+", choices=tuple(BACKENDS), help="default: all; vllm only with --vllm-python"
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of the environment with vLLM")
    parser.add_argument(
        "--pairs", type=int, default=8, metavar="N", help="pairs per backend (8); 0: compare answers only"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads per side (1)")
    parser.add_argument("--json", type=Path, default=Path("backend_speed.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args(argv)
    args.backends = args.backends or [each for each in BACKENDS if each != "vllm" or args.vllm_python]
    if "vllm" in args.backends and not args.vllm_python:
        parser.error("vllm needs a separate environment: give its interpreter with --vllm-python=PYTHON")
    return args


def prepare_model(backend: str) -> str:
    """Return the model that the backend reads under the plugin; its conversion is not timed."""
    default = resolve_model(None)
    if backend in ("transformers", "vllm"):
        return pretrained_path(default)
    if backend == "onnxruntime":
        return str(onnx_directory(default, "fp32", version("onnxruntime-genai")))
    return default.location


def run(command: Sequence[str], threads: int, python: str = sys.executable) -> str:
    """Return the output of a fresh process. Exits if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python, *command], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def run_by_hand(backend: str, work: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the plain script prints."""
    python = args.vllm_python if backend == "vllm" else sys.executable
    printed = run([str(HERE / "by_hand.py"), backend, prepare_model(backend), work], args.threads, python)
    # The backend may print after the JSON.
    result: dict[str, Any] = json.loads(
        [line for line in printed.splitlines() if line.startswith(('{"tokens"', '{"answers"'))][-1]
    )
    return result


def run_plugin(backend: str, work: str, rounds: int, args: argparse.Namespace, scratch: Path) -> Path:
    """Run a test file under the plugin and return the path of its report."""
    report = scratch / "energy.json"
    backend_options = {
        "server": [f"--energy-server={sys.executable} {SERVER} {{model}} {{port}} {{threads}}"],
        "vllm": [f"--energy-python=vllm={args.vllm_python}"],
    }
    options = (
        *backend_options.get(backend, ()),
        *(f"--energy-backend={backend}", f"--energy-report={report}"),
        *(f"--energy-rounds={rounds}", f"--energy-warmup={min(WARM_UP, rounds - 1)}", "--energy-budget=1"),
        *("-q", "-p", "no:cacheprovider", f"--rootdir={scratch}", "-c", os.devnull),
    )
    run(["-m", "pytest", str(HERE / work), *options], args.threads)
    return report


def count_equal(backend: str, args: argparse.Namespace, scratch: Path) -> int:
    """Return the number of prompts that get the same answer, token for token, on both sides.

    Answers are compared as texts if a side has no token ids.
    """
    path = scratch / "answers.jsonl"
    path.unlink(missing_ok=True)
    os.environ["BACKEND_SPEED_ANSWERS"] = str(path)
    run_plugin(backend, "answers_work.py", 1, args, scratch)
    ours = {each["number"]: each for each in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    theirs = run_by_hand(backend, "answers", args)["answers"]
    equal = [
        ours[i]["text" if isinstance(answer, str) else "ids"] == answer for i, answer in enumerate(theirs)
    ]
    for i, same in enumerate(equal):
        if not same:
            print(f"  {backend}, prompt {i}: {ours[i]} in the plugin, {theirs[i]!r} by hand", flush=True)
    return sum(equal)


def measure_by_hand(backend: str, args: argparse.Namespace) -> float:
    """Return the tokens per second of the median generation in the plain script."""
    result = run_by_hand(backend, "speed", args)
    if result["tokens"] != NEW_TOKENS:
        raise SystemExit(f"{backend} by hand gave {result['tokens']} tokens instead of {NEW_TOKENS}")
    return float(NEW_TOKENS / median(result["seconds"]))


def measure_plugin(backend: str, args: argparse.Namespace, scratch: Path) -> float:
    """Return the tokens per second of the median round in the plugin's report."""
    report = run_plugin(backend, "speed_work.py", REPEATS, args, scratch)
    (record,) = json.loads(report.read_text())["records"]
    spans = [each["duration_s"] / each["iterations"] for each in record["rounds"]]
    if {each["tokens"]["output"] / each["iterations"] for each in record["rounds"]} != {NEW_TOKENS}:
        raise SystemExit(f"{backend} in the plugin did not generate {NEW_TOKENS} tokens each time")
    return float(NEW_TOKENS / median(spans))


def measure_pairs(backend: str, args: argparse.Namespace, scratch: Path) -> list[tuple[float, float]]:
    """Measure pairs of tokens per second in the plugin and in the plain script, alternating."""
    found = []
    for number in range(args.pairs):
        # The side that goes first alternates, so that a drift does not favour one of them.
        if number % 2 == 0:
            ours = measure_plugin(backend, args, scratch)
            theirs = measure_by_hand(backend, args)
        else:
            theirs = measure_by_hand(backend, args)
            ours = measure_plugin(backend, args, scratch)
        found.append((ours, theirs))
        print(f"  {backend}: {ours:.1f} in the plugin, {theirs:.1f} by hand, {ours / theirs:.3f}", flush=True)
    return found


def summarise_pairs(backend: str, equal: int, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the median of the pairwise ratios; its uncertainty is the bootstrap scatter of the median."""
    row: dict[str, Any] = {"backend": backend, "equal": equal, "prompts": len(PROMPTS), "pairs": pairs}
    if not pairs:
        return row
    ratios, random = [ours / theirs for ours, theirs in pairs], Random(0)
    medians = [median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    return {
        **row,
        "plugin_tokens_per_s": median(ours for ours, _ in pairs),
        "by_hand_tokens_per_s": median(theirs for _, theirs in pairs),
        "ratio": median(ratios),
        "u_ratio": stdev(medians),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Render one row per backend."""
    head = (
        "| backend | equal answers | in the plugin, tokens/s | by hand, tokens/s | ratio by pairs | pairs |"
    )
    lines = []
    for each in rows:
        speed = (
            f"{each['plugin_tokens_per_s']:.1f} | {each['by_hand_tokens_per_s']:.1f} | "
            f"**{each['ratio']:.3f}** ± {each['u_ratio']:.3f}"
            if each["pairs"]
            else "– | – | –"
        )
        answers = f"{each['equal']} of {each['prompts']}"
        lines.append(f"| {each['backend']} | {answers} | {speed} | {len(each['pairs'])} |")
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: | ---: |", *lines]) + "\n"


def main(argv: Sequence[str]) -> None:
    """Run every pair, print progress, write the files."""
    args = parse_arguments(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="backend-speed-") as scratch:
        for backend in args.backends:
            equal = count_equal(backend, args, Path(scratch))
            print(f"  {backend}: {equal} of {len(PROMPTS)} answers equal", flush=True)
            pairs = measure_pairs(backend, args, Path(scratch))
            rows.append(summarise_pairs(backend, equal, pairs))
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    print(f"\n{table}")
    if args.markdown:
        args.markdown.write_text(table)


if __name__ == "__main__":
    main(sys.argv[1:])
