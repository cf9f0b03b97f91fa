# SPDX-License-Identifier: Apache-2.0
"""Compare serving latencies with guidellm, aiperf and ``vllm bench serve``. See the README in this folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median

from peer_figures import Turn, markdown
from peer_server import PROGRAMS, Server, model_directory, serving
from peer_tools import BODY, OURS, ROOT, TOOLS, Job, Load, RunError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import AIPERF, GUIDELLM, VLLM_BENCH, peer_python

PEERS = {"guidellm": GUIDELLM, "aiperf": AIPERF, "vllm-bench": VLLM_BENCH}
#: Runs of a tool that leaves requests out of its report.
ATTEMPTS = 3
#: Both tokenizer files are needed; aiperf and vLLM refuse the path of the cache's directory.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def parse_load(text: str) -> Load:
    """Parse ``2`` (concurrency) or ``rate=1.5``."""
    name, found, rate = text.partition("=")
    return Load(rate=float(rate)) if found and name == "rate" else Load(concurrency=int(text))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--server", action="append", metavar="NAME", help=f"{', '.join(PROGRAMS)}, or a command (llama.cpp)"
    )
    parser.add_argument("--tools", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument(
        "--loads", nargs="+", type=parse_load, default=[Load(1), Load(2)], metavar="N|rate=R", help="1 2"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each tool (5)")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="requests of a run (16)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens of an answer (32)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of the server (1)")
    parser.add_argument(
        "--script", default="first=0.1 step=0.02", metavar="SETTINGS", help="of the scripted server"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="TOOL=PYTHON", help="use an existing environment"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="limit of a run (600)")
    parser.add_argument("--json", type=Path, default=Path("serving_peers.json"), metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all reports and logs in DIR")
    args = parser.parse_args(argv)
    args.server = args.server or ["llama.cpp"]
    given = dict(each.split("=", 1) for each in args.python)
    if wrong := set(given) - set(PEERS):
        parser.error(f"--python knows {', '.join(PEERS)}, not {', '.join(wrong)}")
    needed = [*args.tools, *(["vllm-bench"] if "vllm" in args.server else [])]
    args.pythons = {tool: Path(given[tool]) if tool in given else peer_python(PEERS[tool]) for tool in needed}
    args.pythons[OURS] = Path(sys.executable)
    return args


def read_prompts(number: int) -> list[str]:
    """Return the first eight prompts of the benchmarks, used in turn."""
    lines = (ROOT / "benchmarks" / "prompts.txt").read_text().splitlines()
    return list(islice(cycle([line for line in lines if line and not line.startswith("#")]), number))


def copy_tokenizer(directory: Path) -> Path:
    """Copy the tokenizer of the model to a directory with a plain name."""
    target = directory / "tokenizer"
    target.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(model_directory() / name, target)
    return target


def warm_up(server: Server, prompts: Sequence[str], new_tokens: int) -> None:
    """Send every prompt once, so that no tool meets a cold server."""
    for prompt in dict.fromkeys(prompts):
        body = {
            **{"model": server.api_model, "prompt": prompt, "max_tokens": new_tokens, "stream": True},
            **{"stream_options": {"include_usage": True}, **BODY},
        }
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()


def run_turn(tool: str, server: Server, job: Job, args: argparse.Namespace, name: str, repeat: int) -> Turn:
    """Run one tool until its report holds every request: guidellm's may lack the last one."""
    for attempt in range(ATTEMPTS):
        attempted = replace(job, out=job.out / str(attempt))
        attempted.out.mkdir(parents=True)
        load_average, start_s = os.getloadavg()[0], time.monotonic()
        sample = TOOLS[tool].run(attempted, args.pythons[tool], args.timeout)
        if len(sample.ttft) == len(job.prompts):
            break
        print(f"  {tool}: its report has {len(sample.ttft)} of {len(job.prompts)} requests", flush=True)
    else:
        raise RunError(f"{tool}: {ATTEMPTS} reports without all requests")
    try:
        wire = server.wire_sample(job, start_s, TOOLS[tool].counts)
    except RunError as error:
        raise RunError(f"{tool}: {error}") from None
    return Turn(tool, name, job.load, repeat, sample, wire, load_average)


def measure(name: str, args: argparse.Namespace, tools: Sequence[str], out: Path) -> Iterator[Turn]:
    """Start a server, and yield one run after another."""
    prompts, tokenizer = read_prompts(args.requests), copy_tokenizer(out)
    settings = {"threads": str(args.threads), "script": args.script}
    settings["vllm_python"] = str(args.pythons.get("vllm-bench", ""))
    with serving(name, settings, out, args.timeout) as server:
        warm_up(server, prompts, args.new_tokens)
        # Repeats are the outer loop, so that slow changes of the machine affect every load.
        for repeat, load in product(range(args.repeats), args.loads):
            # The order rotates, so that a drift does not favour one of them.
            for tool in (*tools[repeat % len(tools) :], *tools[: repeat % len(tools)]):
                place = out / f"{repeat}-{load.name.replace('/', '-')}-{tool}".replace(" ", "-")
                job = Job(server.url, server.api_model, tokenizer, prompts, args.new_tokens, load, place)
                yield run_turn(tool, server, job, args, name, repeat)


def main(argv: Sequence[str]) -> None:
    """Run every tool in turn, print progress, write the files."""
    args = parse_arguments(argv)
    tools, turns = [OURS, *args.tools], []
    with tempfile.TemporaryDirectory(prefix="serving-peers-") as scratch:
        root = (args.keep or Path(scratch)).resolve() / time.strftime("%Y%m%d-%H%M%S")
        for number, name in enumerate(args.server):
            out = root / f"server-{number}"
            out.mkdir(parents=True)
            for turn in measure(name, args, tools, out):
                turns.append(turn)
                middle = f"{median(turn.sample.ttft):.4f} s to the first token"
                print(
                    f"{name}, {turn.load.name}, repeat {turn.repeat + 1}, {turn.tool}: {middle}", flush=True
                )
                # Written each time, so that little is lost on a kill.
                args.json.write_text(json.dumps([asdict(each) for each in turns]) + "\n")
    table = markdown(turns, tools)
    print(f"\n{table}")
    if args.markdown:
        args.markdown.write_text(table + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RunError as error:
        raise SystemExit(str(error)) from None
