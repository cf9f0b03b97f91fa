# SPDX-License-Identifier: Apache-2.0
"""Is an engine slower under the plugin than called by hand? See the README beside this file."""

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

from by_hand import ENGINES, SERVER
from speed_setting import NEW_TOKENS, REPEATS, WARM_UP

from pytest_llenergy.backends.convert import onnx_directory, pretrained_path
from pytest_llenergy.backends.models import resolve_model

HERE = Path(__file__).parent
RESAMPLES = 2000


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engines", nargs="+", choices=tuple(ENGINES), help="all, vllm if its Python is given"
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of the environment that has vLLM")
    parser.add_argument("--pairs", type=int, default=8, metavar="N", help="of each engine (8)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of either side (1)")
    parser.add_argument("--json", type=Path, default=Path("engine_speed.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    given = parser.parse_args(argv)
    given.engines = given.engines or [each for each in ENGINES if each != "vllm" or given.vllm_python]
    if "vllm" in given.engines and not given.vllm_python:
        parser.error("vllm has an environment of its own; name its Python: --vllm-python=PYTHON")
    return given


def model_of(engine: str) -> str:
    """What the engine reads when the plugin runs it: made on first use, and never timed."""
    default = resolve_model(None)
    if engine in ("transformers", "vllm"):
        return pretrained_path(default)
    if engine == "onnxruntime":
        return str(onnx_directory(default, "fp32", version("onnxruntime-genai")))
    return default.location


def run(command: Sequence[str], threads: int, python: str = sys.executable) -> str:
    """What a fresh process printed. Ends the comparison if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python, *command], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def by_hand(engine: str, given: argparse.Namespace) -> float:
    """Tokens per second of the median generation."""
    python = given.vllm_python if engine == "vllm" else sys.executable
    printed = run([str(HERE / "by_hand.py"), engine, model_of(engine)], given.threads, python)
    # An engine may have last words of its own.
    said = json.loads([line for line in printed.splitlines() if line.startswith('{"tokens"')][-1])
    if said["tokens"] != NEW_TOKENS:
        raise SystemExit(f"{engine} by hand gave {said['tokens']} tokens, {NEW_TOKENS} were asked for")
    return float(NEW_TOKENS / median(said["seconds"]))


def plugin(engine: str, given: argparse.Namespace, scratch: Path) -> float:
    """The same, of the rounds in the report."""
    report, threads = scratch / "energy.json", given.threads
    of_engine = {
        "server": [f"--energy-server-command={sys.executable} {SERVER} {{model}} {{port}} {{threads}}"],
        "vllm": [f"--energy-python=vllm={given.vllm_python}"],
    }
    options = (
        *of_engine.get(engine, ()),
        *(f"--energy-backend={engine}", f"--energy-threads={threads}", f"--energy-report={report}"),
        *(f"--energy-rounds={REPEATS}", f"--energy-warmup={WARM_UP}", "--energy-budget=1"),
        *("-q", "-p", "no:cacheprovider", f"--rootdir={scratch}", "-c", os.devnull),
    )
    run(["-m", "pytest", str(HERE / "speed_work.py"), *options], threads)
    (record,) = json.loads(report.read_text())["records"]
    spans = [each["duration_s"] / each["iterations"] for each in record["rounds"]]
    if {each["tokens"]["output"] / each["iterations"] for each in record["rounds"]} != {NEW_TOKENS}:
        raise SystemExit(f"{engine} in the plugin did other work than {NEW_TOKENS} tokens a generation")
    return float(NEW_TOKENS / median(spans))


def pairs_of(engine: str, given: argparse.Namespace, scratch: Path) -> list[tuple[float, float]]:
    """Tokens per second in the plugin and by hand, in turn."""
    found = []
    for number in range(given.pairs):
        # Ours first, theirs first, theirs ... so that a drift does not favour one of them.
        if number % 2 == 0:
            ours = plugin(engine, given, scratch)
            theirs = by_hand(engine, given)
        else:
            theirs = by_hand(engine, given)
            ours = plugin(engine, given, scratch)
        found.append((ours, theirs))
        print(f"  {engine}: {ours:.1f} in the plugin, {theirs:.1f} by hand, {ours / theirs:.3f}", flush=True)
    return found


def row(engine: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The ratio pair by pair; its uncertainty is the scatter of the median over resampled pairs."""
    ratios, random = [ours / theirs for ours, theirs in pairs], Random(0)
    medians = [median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    return {
        "engine": engine,
        "plugin_tokens_per_s": median(ours for ours, _ in pairs),
        "by_hand_tokens_per_s": median(theirs for _, theirs in pairs),
        "ratio": median(ratios),
        "u_ratio": stdev(medians),
        "pairs": pairs,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line an engine."""
    head = "| engine | in the plugin, tokens/s | by hand, tokens/s | ratio, pair by pair | pairs |"
    lines = [
        f"| {each['engine']} | {each['plugin_tokens_per_s']:.1f} | {each['by_hand_tokens_per_s']:.1f} | "
        f"**{each['ratio']:.3f}** ± {each['u_ratio']:.3f} | {len(each['pairs'])} |"
        for each in rows
    ]
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: |", *lines]) + "\n"


def main(argv: Sequence[str]) -> None:
    """Run every pair, print as it goes, write the files."""
    given = arguments(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="engine-speed-") as scratch:
        for engine in given.engines:
            rows.append(row(engine, pairs_of(engine, given, Path(scratch))))
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    print(f"\n{table}")
    if given.markdown:
        given.markdown.write_text(table)


if __name__ == "__main__":
    main(sys.argv[1:])
