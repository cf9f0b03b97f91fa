# SPDX-License-Identifier: Apache-2.0
"""Run a tool once against a server and read the latencies of its requests from its own report."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_llenergy.record.report import decode_report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: The command ``vllm``, also for its build for CPUs.
VLLM_CLI = ROOT / "tests" / "backends" / "servers" / "vllm_cli.py"
OURS = "pytest-llenergy"

#: In every request of every tool. Servers that do not know ``cache_prompt`` (llama.cpp's name for the prefix
#: cache of a request) ignore it.
BODY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}


class RunError(Exception):
    """A tool failed, or it sent other requests than it was asked for."""


@dataclass(frozen=True)
class Load:
    """A closed loop of ``concurrency`` requests, or a constant ``rate`` in requests per second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{self.rate:g} requests/s" if self.rate else f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Job:
    """What every tool is asked for. ``prompts`` holds one prompt per request, in the order of sending."""

    url: str
    api_model: str
    tokenizer: Path
    prompts: Sequence[str]
    new_tokens: int
    load: Load
    out: Path

    def write_prompts(self, key: str, **more: object) -> str:
        """Write a JSONL file of prompts under ``key`` and return its path."""
        path = self.out / "prompts.jsonl"
        path.write_text("".join(json.dumps({key: each, **more}) + "\n" for each in self.prompts))
        return str(path)


@dataclass(frozen=True)
class Sample:
    """Latencies of one run in seconds: one value per request, and one per gap between tokens.

    ``gap`` is None for a tool that does not report gaps. ``joules`` is the energy per output token.
    """

    ttft: list[float]
    tpot: list[float]
    e2e: list[float]
    gap: list[float] | None
    joules: float | None = None
    kind: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """How to call a tool, and how to read what it wrote.

    ``counts`` names the list of the wire that has what the tool takes for tokens: all, or those with text.
    """

    name: str
    command: Callable[[Job], list[str]]
    read: Callable[[Job], Sample]
    environment: Mapping[str, str] = field(default_factory=dict)
    counts: str = "tokens_s"

    def run(self, job: Job, python: Path, timeout_s: float) -> Sample:
        """Run the tool in ``job.out``.

        Raises:
            RunError: It failed; the message ends with its output.
        """
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **self.environment}
        if self.name == OURS:
            environment["SERVING_PEERS_LOAD"] = json.dumps(
                {
                    **{"prompts": list(job.prompts), "new_tokens": job.new_tokens},
                    **{"concurrency": job.load.concurrency, "rate": job.load.rate},
                }
            )
        else:
            # The peers have their own environments.
            environment.pop("PYTHONPATH", None)
        command = [str(python), *self.command(job)]
        with (job.out / "output.log").open("wb") as log:
            done = subprocess.run(
                command,
                cwd=job.out,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        try:
            if done.returncode == 0:
                return self.read(job)
            found = f"exit status {done.returncode}"
        except (OSError, LookupError, ValueError) as error:
            found = f"no readable report ({error!r})"
        tail = (job.out / "output.log").read_text(errors="replace")[-3000:]
        raise RunError(f"{self.name}: {found}\n{' '.join(command)}\n{tail}")


def _our_command(job: Job) -> list[str]:
    options = {
        **{"backend": "server", "server": job.url, "report": job.out / "energy.json"},
        # One round of all requests per run: the runs are the repeats.
        **{"rounds": 1, "warmup": 0, "budget": 1},
    }
    chosen = [f"--energy-{name}={value}" for name, value in options.items()]
    quiet = ["-q", "-p", "no:cacheprovider", f"--rootdir={job.out}", "-c", os.devnull]
    return ["-m", "pytest", str(HERE / "peer_work.py"), *chosen, *quiet]


def _read_ours(job: Job) -> Sample:
    path = job.out / "energy.json"
    report = decode_report(path.read_bytes(), path.name)
    (record,) = report.records
    if record.status != "measured" or len(record.rounds) != 1:
        raise ValueError(f"{record.status}, {len(record.rounds)} rounds, {record.reason}")
    metric = record.metrics.get("energy_per_output_token_j")
    (measured,) = record.rounds
    return Sample(
        **read_served(measured.served),
        joules=metric.value if metric is not None else None,
        kind=record.kind or "",
        notes=tuple(sorted({flag.name for flag in measured.flags})),
    )


def read_served(served: Any) -> dict[str, Any]:
    """Return the latencies of a round. The gaps of a round are a histogram."""
    gaps = served.token_gaps
    return {
        "ttft": list(served.time_to_first_token_s),
        "tpot": [each for each in served.time_per_output_token_s if each is not None],
        "e2e": list(served.end_to_end_latency_s),
        "gap": gaps
        and [gap for gap, count in zip(gaps.gap_s, gaps.count, strict=True) for _ in range(count)],
    }


def _guidellm_command(job: Job) -> list[str]:
    backend = {
        **{"kind": "openai_http", "target": job.url, "model": job.api_model, "http2": False},
        **{"request_format": "/v1/completions", "max_tokens": job.new_tokens, "extras": {"body": BODY}},
    }
    load = job.load
    profile = (
        f"kind=constant,rate={load.rate}" if load.rate else f"kind=concurrent,streams={load.concurrency}"
    )
    options = {
        **{"backend": json.dumps(backend), "profile": profile},
        "constraint": f"kind=max_requests,count={len(job.prompts)}",
        "data": f"kind=json_file,path={job.write_prompts('prompt')}",
        "tokenizer": f"kind=huggingface_auto,model={job.tokenizer}",
        "output": f"kind=json,path={job.out / 'guidellm.json'}",
    }
    chosen = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["-m", "guidellm", "run", *chosen, "--disable-progress"]


def _read_guidellm(job: Job) -> Sample:
    (benchmark,) = json.loads((job.out / "guidellm.json").read_bytes())["benchmarks"]
    done = benchmark["requests"]["successful"]
    return Sample(
        ttft=[each["time_to_first_token_ms"] / 1e3 for each in done],
        # It calls the mean gap of a request ITL; its own TPOT is E2E over all tokens.
        tpot=[each["inter_token_latency_ms"] / 1e3 for each in done],
        e2e=[each["request_latency"] for each in done],
        gap=None,
    )


def _aiperf_command(job: Job) -> list[str]:
    load = job.load
    arrivals = (
        ["--request-rate", f"{load.rate}", "--request-rate-mode", "constant"]
        if load.rate
        else ["--concurrency", f"{load.concurrency}"]
    )
    options = {
        **{"model": job.api_model, "endpoint-type": "completions", "url": job.url},
        "input-file": job.write_prompts("text", output_length=job.new_tokens),
        **{"custom-dataset-type": "single-turn", "dataset-sampling-strategy": "sequential"},
        **{"request-count": len(job.prompts), "tokenizer": job.tokenizer, "ui": "none"},
        "artifact-dir": job.out / "aiperf",
    }
    chosen = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    body = [word for name, value in BODY.items() for word in ("--extra-inputs", f"{name}:{value}".lower())]
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    return ["-m", "aiperf", "profile", *chosen, *arrivals, *body, *flags]


def _read_aiperf(job: Job) -> Sample:
    lines = (job.out / "aiperf" / "profile_export.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    if errors := {each["error"]["message"] for each in found if each.get("error")}:
        raise ValueError("; ".join(errors))
    done = [each["metrics"] for each in found]
    return Sample(
        ttft=[each["time_to_first_token"]["value"] / 1e3 for each in done],
        # It calls the mean gap of a request ITL, too; the gaps are its inter-chunk latencies.
        tpot=[each["inter_token_latency"]["value"] / 1e3 for each in done],
        e2e=[each["request_latency"]["value"] / 1e3 for each in done],
        gap=[gap / 1e3 for each in done for gap in each["inter_chunk_latency"]["value"]],
    )


def _vllm_command(job: Job) -> list[str]:
    load = job.load
    # Gamma arrivals of so little burstiness have a constant rate.
    arrivals = (
        ["--request-rate", f"{load.rate}", "--burstiness", "1e9"]
        if load.rate
        else ["--max-concurrency", f"{load.concurrency}"]
    )
    options = {
        **{"backend": "openai", "endpoint": "/v1/completions", "base-url": job.url},
        **{"model": job.api_model, "tokenizer": job.tokenizer, "dataset-name": "custom"},
        **{"dataset-path": job.write_prompts("prompt"), "custom-output-len": job.new_tokens},
        **{"num-prompts": len(job.prompts), "temperature": 0, "extra-body": json.dumps(BODY)},
        "result-filename": job.out / "vllm.json",
    }
    chosen = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ["--skip-chat-template", "--ignore-eos", "--disable-shuffle", "--disable-tqdm"]
    program = [str(VLLM_CLI), "bench", "serve"]
    return [*program, *chosen, *arrivals, *flags, "--save-result", "--save-detailed"]


def _read_vllm(job: Job) -> Sample:
    found = json.loads((job.out / "vllm.json").read_bytes())
    if found["failed"]:
        raise ValueError("; ".join({each.splitlines()[-1] for each in found["errors"] if each}))
    each = zip(found["latencies"], found["ttfts"], found["output_lens"], strict=True)
    return Sample(
        ttft=found["ttfts"],
        tpot=[(latency - ttft) / (tokens - 1) for latency, ttft, tokens in each],
        e2e=found["latencies"],
        # One more than the tokens have: it counts the event that ends the stream.
        gap=[gap for gaps in found["itls"] for gap in gaps],
    )


TOOLS = {
    each.name: each
    for each in (
        Tool(OURS, _our_command, _read_ours),
        Tool("guidellm", _guidellm_command, _read_guidellm, {"HF_HUB_OFFLINE": "1"}, "texts_s"),
        # Offline, aiperf takes its tokenizer from the hub's cache alone and refuses a directory.
        Tool("aiperf", _aiperf_command, _read_aiperf, counts="texts_s"),
        Tool("vllm-bench", _vllm_command, _read_vllm, {"HF_HUB_OFFLINE": "1"}),
    )
}
