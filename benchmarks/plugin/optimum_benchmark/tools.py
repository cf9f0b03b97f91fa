# SPDX-License-Identifier: Apache-2.0
"""Run either tool once in a separate process and convert its report to common terms."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from setting import BATCH_SIZE, NEW_TOKENS, PROMPT_TOKENS

from pytest_llenergy.energy.cpu_time import read_cpu_time
from pytest_llenergy.record.report import decode_report

HERE = Path(__file__).resolve().parent
OURS = "pytest-llenergy"
PEER = "optimum-benchmark"
JOULES_PER_KWH = 3.6e6
LOG_TAIL_LINES = 30

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RunError(Exception):
    """Raised when a tool fails or does different work from the plan."""


@dataclass(frozen=True)
class Plan:
    """Parameters of one run. ``launcher`` applies to the peer only."""

    tool: str
    launcher: str | None
    threads: int
    model: Path
    rounds: int
    warmup: int
    timeout_s: float


@dataclass(frozen=True)
class Cost:
    """Cost of a process: seconds until its report was on disk, seconds until its end, and CPU seconds.

    CPU time includes all child processes and is the least noisy of these on a shared machine. ``other_cores``
    is the mean number of cores that the rest of the host used meanwhile: the higher it is, the less reliable
    the measured rates are. ``load_average`` is that of the minute before the run.
    """

    report_s: float
    exit_s: float
    cpu_s: float
    other_cores: float
    load_average: float


@dataclass(frozen=True)
class Result:
    """One run in common terms. ``generates`` counts every full generation, measured or not."""

    tool: str
    launcher: str | None
    threads: int
    decode_tokens_per_s: float
    tokens_per_s: float
    generate_s: list[float]
    prefill_s: list[float]
    generates: int
    energy_j: float | None
    energy_u_j: float | None
    energy_kind: str
    energy_parts_j: dict[str, float]
    notes: list[str]
    versions: dict[str, str]
    spent: Cost


def run(plan: Plan, out: Path, peer_python: Path) -> Result:
    """Run one tool in the empty directory ``out``.

    Raises:
        RunError: The tool failed; the message ends with its output.
    """
    if plan.tool == OURS:
        spent = _spawn(_our_command(plan, out), out, plan, HERE, out / "energy.json")
        return _read_ours(plan, out / "energy.json", spent)
    command = [str(peer_python), str(HERE / "peer.py"), str(plan.model), str(out), str(plan.launcher)]
    command += [str(plan.rounds), str(plan.warmup)]
    # The peer leaves a log and CodeCarbon's files in the current directory.
    spent = _spawn(command, out, plan, out, out / "report.json")
    return _read_peer(plan, out, spent)


def _our_command(plan: Plan, out: Path) -> list[str]:
    options = {
        "backend": "transformers",
        "model": plan.model,
        "threads": plan.threads,
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "report": out / "energy.json",
    }
    chosen = [f"--energy-{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "pytest", str(HERE / "same_work.py"), *chosen]


def make_environment(threads: int) -> dict[str, str]:
    """Return the environment of both tools: number of threads, no model downloads, no GPU."""
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
    }


def _spawn(command: Sequence[str], out: Path, plan: Plan, cwd: Path, report: Path) -> Cost:
    load = os.getloadavg()[0]
    log = out / "output.log"
    before, host_before = resource.getrusage(resource.RUSAGE_CHILDREN), read_cpu_time()
    # The report's mtime is wall-clock time; the duration comes from the monotonic clock.
    wall_start_ns, start = time.time_ns(), time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=make_environment(plan.threads),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(plan.timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunError(
                    f"{plan.tool}: not finished after {plan.timeout_s:g} s\n{_tail(log)}"
                ) from None
            raise
    exit_s = time.monotonic() - start
    after, host_after = resource.getrusage(resource.RUSAGE_CHILDREN), read_cpu_time()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if code != 0 or not report.exists():
        raise RunError(f"{plan.tool}: exit code {code}\n{_tail(log)}")
    return Cost(
        report_s=(report.stat().st_mtime_ns - wall_start_ns) / 1e9,
        exit_s=exit_s,
        cpu_s=cpu_s,
        other_cores=max(0.0, host_after.busy_s - host_before.busy_s - cpu_s) / exit_s,
        load_average=load,
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def _compute_rates(generate_s: Sequence[float], prefill_s: Sequence[float]) -> tuple[float, float]:
    """Return decode and end-to-end tokens per second, with one definition for both tools.

    The first token comes with the prefill, so the remaining time yields one token less.
    """
    decode_s = fmean(generate_s) - fmean(prefill_s)
    return BATCH_SIZE * (NEW_TOKENS - 1) / decode_s, BATCH_SIZE * NEW_TOKENS / fmean(generate_s)


def _read_ours(plan: Plan, path: Path, spent: Cost) -> Result:
    report = decode_report(path.read_bytes(), path.name)
    if len(report.records) != 1 or report.records[0].status != "measured":
        raise RunError(f"{OURS}: {[(record.status, record.reason) for record in report.records]}")
    record = report.records[0]
    threads = {rank.threads for rank in record.ranks}
    counts = {(each.tokens.input, each.tokens.output) for each in record.rounds if each.tokens}
    if threads != {plan.threads} or counts != {(BATCH_SIZE * PROMPT_TOKENS, BATCH_SIZE * NEW_TOKENS)}:
        raise RunError(f"{OURS}: {threads} threads, (input, output) tokens {counts}; differs from the plan")
    generate_s = [each.duration_s for each in record.rounds]
    prefill_s = [
        phase.duration_s for each in record.rounds for phase in each.phases if phase.name == "prefill"
    ]
    decode_rate, rate = _compute_rates(generate_s, prefill_s)
    metric = record.metrics["energy_per_request_j"]
    backend = record.backend
    parts = {
        name: fmean(each.by_domain[name].energy_j or 0.0 for each in record.rounds)
        for name in record.rounds[0].by_domain
    }
    flags = [flag.name for each in record.rounds for flag in each.flags]
    return Result(
        tool=plan.tool,
        launcher=None,
        threads=plan.threads,
        decode_tokens_per_s=decode_rate,
        tokens_per_s=rate,
        generate_s=generate_s,
        prefill_s=prefill_s,
        generates=plan.rounds + plan.warmup,
        energy_j=metric.value,
        energy_u_j=metric.uncertainty,
        energy_kind=record.kind or "none",
        energy_parts_j=parts,
        notes=sorted({f"{name} in {flags.count(name)} of {plan.rounds} rounds" for name in flags}),
        versions={
            OURS: report.tool.version,
            "transformers": backend.version if backend else "",
            "torch": str(backend.options.get("torch")) if backend else "",
        },
        spent=spent,
    )


def _read_peer(plan: Plan, out: Path, spent: Cost) -> Result:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    versions: dict[str, Any] = json.loads((out / "versions.json").read_text())
    threads = versions.pop("threads")
    generate_s: list[float] = report["generate"]["latency"]["values"]
    prefill_s: list[float] = report["prefill"]["latency"]["values"]
    if threads != plan.threads or len(generate_s) != plan.rounds:
        raise RunError(f"{PEER}: {threads} threads, {len(generate_s)} iterations; differs from the plan")
    decode_rate, rate = _compute_rates(generate_s, prefill_s)
    energy: dict[str, Any] = report["generate"]["energy"]
    if energy["unit"] != "kWh":
        raise RunError(f"{PEER}: energy in {energy['unit']}, expected kWh")
    return Result(
        tool=plan.tool,
        launcher=plan.launcher,
        threads=plan.threads,
        decode_tokens_per_s=decode_rate,
        tokens_per_s=rate,
        generate_s=generate_s,
        prefill_s=prefill_s,
        # Its warm-up is two full generations and some of two tokens; its joules come from a second pass.
        generates=2 * plan.rounds + (2 if plan.warmup else 0),
        energy_j=energy["total"] * JOULES_PER_KWH,
        energy_u_j=None,
        energy_kind="not stated",
        energy_parts_j={name: energy[name] * JOULES_PER_KWH for name in ("cpu", "ram", "gpu")},
        notes=[],
        versions={name: str(version) for name, version in versions.items()},
        spent=spent,
    )
