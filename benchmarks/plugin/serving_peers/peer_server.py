# SPDX-License-Identifier: Apache-2.0
"""The servers under load, each behind ``wire.py``, and what the wire saw of a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from peer_tools import ROOT, VLLM_CLI, Job, RunError, Sample
from wire import HOST

from pytest_llenergy.backends.convert import pretrained_path
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.server.settings import find_free_port

HERE = Path(__file__).resolve().parent
POLL_S = 0.2
#: How long a request of the wire may be missing in its log after the tool has ended.
LOG_WAIT_S = 5.0

PROGRAMS = {
    "llama.cpp": f"{{python}} {ROOT / 'benchmarks/serving/llama_server.py'} {{gguf}} {{port}} {{threads}}",
    # Compiling takes minutes and changes nothing of what a client sees.
    "vllm": (
        f"{{vllm_python}} {VLLM_CLI} serve {{model}} --port {{port}} --host {HOST} "
        "--no-enable-prefix-caching --enable-prompt-tokens-details --max-model-len 2048 --enforce-eager"
    ),
    "scripted": f"{{python}} {ROOT / 'tests/backends/servers/scripted.py'} {{port}} {{script}}",
}


@dataclass(frozen=True)
class Server:
    """A server that answers at ``url``; the wire's log is at ``log``."""

    url: str
    api_model: str
    log: Path

    def wire_sample(self, job: Job, start_s: float, of: str) -> Sample:
        """Return the latencies that the wire saw of the requests of ``job``, sent after ``start_s``.

        Args:
            job: What the tool was asked for.
            start_s: When the tool was started, on the monotonic clock.
            of: The events that the tool counts, a key of the wire's log.

        Raises:
            RunError: The tool sent other prompts, or asked for another number of tokens.
        """
        expected, deadline = Counter(job.prompts), time.monotonic() + LOG_WAIT_S
        while True:
            seen = [json.loads(line) for line in self.log.read_text().splitlines()]
            # Tools send requests before the load, to see whether the server answers.
            mine = sorted(
                (each for each in seen if each["start_s"] >= start_s), key=lambda each: each["start_s"]
            )
            load = mine[-len(job.prompts) :]
            sent = Counter(str(each["body"].get("prompt")) for each in load)
            if sent == expected or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if sent != expected:
            raise RunError(f"other prompts were sent: {len(load)} requests, {sorted(sent - expected)[:2]}")
        for each in load:
            if each["body"].get("max_tokens") != job.new_tokens or not each["body"].get("ignore_eos"):
                raise RunError(f"a request differs from the plan: {each['body']}")
        return Sample(
            ttft=[each[of][0] - each["start_s"] for each in load],
            tpot=[(each[of][-1] - each[of][0]) / (job.new_tokens - 1) for each in load],
            e2e=[each[of][-1] - each["start_s"] for each in load],
            gap=[b - a for each in load for a, b in pairwise(each[of])],
        )


def model_directory() -> Path:
    """Return the packaged model as a directory of safetensors, whose tokenizer the peers load."""
    return Path(pretrained_path(resolve_model(None)))


@contextmanager
def serving(name: str, settings: Mapping[str, str], out: Path, timeout_s: float) -> Iterator[Server]:
    """Run a server behind the wire.

    Raises:
        RunError: It is not ready in time; the message ends with its output.
    """
    port, inner = find_free_port(), find_free_port()
    places = {
        **{"python": sys.executable, "gguf": resolve_model(None).location, "model": str(model_directory())},
        **{"port": str(inner), **settings},
    }
    command = [place for word in shlex.split(PROGRAMS.get(name, name)) for place in _fill(word, places)]
    log = out / "wire.jsonl"
    wire = [sys.executable, str(HERE / "wire.py"), str(port), str(log), str(inner), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": settings["threads"], "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (out / "server.log").open("wb") as sink:
        # A group of its own ends where the server's processes end, for the plugin that looks for them.
        process = subprocess.Popen(
            wire, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://{HOST}:{port}"
    try:
        _await(lambda: _get(f"{url}/health") is not None, process, timeout_s, out / "server.log")
        models = json.loads(_get(f"{url}/v1/models") or b"{}")
        yield Server(url, models["data"][0]["id"], log)
    finally:
        process.terminate()
        process.wait()


def _fill(word: str, places: Mapping[str, str]) -> list[str]:
    """Replace a placeholder; a script of several settings becomes several words."""
    return shlex.split(places["script"]) if word == "{script}" else [word.format_map(places)]


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body
    except OSError:
        return None


def _await(is_ready: Callable[[], bool], process: Any, timeout_s: float, log: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the server is not ready:\n{log.read_text(errors='replace')[-3000:]}")
        # Servers do not notify when they are ready.
        time.sleep(POLL_S)
