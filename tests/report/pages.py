# SPDX-License-Identifier: Apache-2.0
"""Reports with everything that a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import msgspec

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.compare.history.trend import Trend, TrendPoint
from pytest_llenergy.measure.power_trace import MAX_STEPS
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint, slo
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.power_trace import DomainPower, PhaseSpan, PowerTrace
from pytest_llenergy.record.record import BackendInfo, Flag, Phase, Record, Round, Tokens, WindowRecord
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.html.page import render_compared, render_report

from ..compare.runs import SPOILED, TEST, record_of, report_of, round_of

WARM = Flag(name="temperature", severity="note", detail="4 of 8 rounds: warmer than 60 °C at the start")

#: What a test of each verdict is changed by.
CHANGES = {"regressed": 1.08, "improved": 0.9, "unchanged": 1.001, "inconclusive": 1.035}


@dataclass(frozen=True)
class Pair:
    """Both sides, and what was found."""

    base: Report
    head: Report
    compared: ComparedReports


def rounds_of(rng: Random, joules: float, seconds: float, noise: float, first_s: float) -> list[Round]:
    """Eight rounds, of which one is invalid, of a machine that warms up."""
    made = []
    for number in range(8):
        energy_j, duration_s = joules * rng.gauss(1, noise), seconds * rng.gauss(1, noise / 2)
        made.append(
            Round(
                start_s=first_s + 7.5 * number,
                duration_s=duration_s,
                energy_j=energy_j,
                energy_u_j=joules * 0.003,
                energy_u_absolute_j=joules * 0.02,
                iterations=2,
                tokens=Tokens(input=120, output=2048 + round(seconds * 300)),
                requests=4,
                phases=[
                    Phase(
                        name="prefill", duration_s=0.2 * duration_s, energy_j=0.3 * energy_j, energy_u_j=0.5
                    ),
                    Phase(
                        name="decode", duration_s=0.8 * duration_s, energy_j=0.7 * energy_j, energy_u_j=0.5
                    ),
                ],
                temperature_start_c=44 + 14 * (1 - 0.7**number),
                flags=[SPOILED] if number == 5 else [],
            )
        )
    return made


def trace_of(rng: Random, round_: Round, ticks: int = 60) -> PowerTrace:
    """Two iterations, each of which begins with more power; two boards and a processor."""
    length_s = round_.duration_s
    edges = [length_s * (step / ticks * 1.5 - 0.25) for step in range(ticks + 1)]
    edges = sorted(
        {*(edge for edge in edges if abs(edge) > 1e-9 and abs(edge - length_s) > 1e-9), 0.0, length_s}
    )
    half = length_s / 2
    spans = [
        PhaseSpan(name=name, start_s=begin + start * half, end_s=begin + end * half)
        for begin in (0.0, half)
        for name, start, end in (("prefill", 0.0, 0.2), ("decode", 0.2, 1.0))
    ]

    def watts(at_s: float, idle: float, load: float) -> float:
        if not 0 <= at_s < length_s:
            return idle + rng.uniform(0, 2)
        return load * (1.25 if at_s % half < 0.2 * half else 0.95) + rng.gauss(0, load * 0.02)

    by_domain = {
        name: DomainPower(
            kind="measured",
            edges_s=edges,
            power_w=[watts((a + b) / 2, idle, load) for a, b in pairwise(edges)],
        )
        for name, idle, load in (("gpu:GPU-a", 70, 430), ("gpu:GPU-b", 72, 420), ("cpu:package-0", 45, 80))
    }
    return PowerTrace(start_s=round_.start_s, duration_s=length_s, by_domain=by_domain, spans=spans)


def record_like(
    name: str, rng: Random, joules: float, seconds: float, noise: float, first_s: float, steps: int = 60
) -> Record:
    """A measured test."""
    rounds = rounds_of(rng, joules, seconds, noise, first_s)
    return record_of(
        name,
        rounds=rounds,
        metrics=compute_metrics(rounds, 3 * 2**30),
        power_trace=trace_of(rng, rounds[3], steps),
        flags=[WARM],
    )


def names(count: int) -> list[str]:
    """Ids as people have them."""
    models = ("smollm2-135m", "qwen3-0.6b", "llama3.2-1b")
    return [
        f"benchmarks/inference/test_decode.py::test_decode[{models[i % 3]}-bs{2 ** (i // 3)}-bfloat16]"
        for i in range(count)
    ]


def pair_of(ids: Sequence[str], changes: Sequence[float] = tuple(CHANGES.values()), steps: int = 60) -> Pair:
    """Two runs of some tests, which change in turn; one more is new, one was removed, and one is invalid."""
    rng = Random(7)
    base, head = [], []
    for place, name in enumerate(ids):
        seconds = 2.0 + 0.2 * (place % 7)
        joules = (800.0 + 40 * (place % 5)) * seconds
        change = changes[place % len(changes)]
        noise = 0.03 if change == CHANGES["inconclusive"] else 0.008
        base.append(record_like(name, rng, joules, seconds, noise, 100.0, steps))
        head.append(record_like(name, rng, joules * change, seconds * change**0.5, noise, 102.0, steps))
    gone = record_like("benchmarks/test_old.py::test_gone", rng, 1700.0, 2.0, 0.01, 100.0)
    # Another workload: otherwise it would be the removed test under another name.
    added = record_like("benchmarks/test_new.py::test_added", rng, 1700.0, 2.0, 0.01, 100.0)
    added = msgspec.structs.replace(added, params={"batch_size": 16})
    lost = msgspec.structs.replace(
        record_of("benchmarks/test_prefill.py::test_lost", [None] * 6),
        status="invalid",
        reason="the counter stood still",
    )
    sides = report_of(*base, gone, lost), report_of(*head, added, lost)
    compared = compare_reports(*sides, ("base.json", "head.json"), [Criterion(gated=True)])
    return Pair(*sides, compared)


@cache
def pair_shown() -> tuple[Pair, str]:
    """Four tests, with as many steps of power as a record may have, and their page."""
    pair = pair_of(names(4), steps=MAX_STEPS)
    days = [(f"2026-01-0{day}T00:00:00Z", f"c0ffee{day}", 1.0 + day / 10) for day in range(1, 7)]
    points = [TrendPoint(*day, changed=place == 3) for place, day in enumerate(days)]
    trend = Trend(names(1)[0], "energy_j", "J", points)
    return pair, render_compared(pair.base, pair.head, pair.compared, [trend], pairs="6+6")


def decode_record(backend: str, batch_size: int, rng: Random) -> Record:
    """A decode test of a backend; larger batches are slower, and need less energy for a token."""
    speed = {"transformers": 40.0, "llamacpp": 110.0, "openvino": 90.0}[backend]
    joules = {"transformers": 0.9, "llamacpp": 0.42, "openvino": 0.35}[backend] * batch_size**-0.55
    tokens, rounds = 256 * batch_size, []
    for number in range(6):
        energy_j = joules * tokens * rng.gauss(1, 0.02)
        duration_s = tokens / speed / batch_size**0.7 * rng.gauss(1, 0.01)
        rounds.append(
            Round(
                start_s=100 + 30.0 * number,
                duration_s=duration_s,
                energy_j=energy_j,
                energy_u_j=energy_j * 0.01,
                energy_u_absolute_j=energy_j * 0.05,
                tokens=Tokens(input=30, output=tokens),
                requests=batch_size,
                inter_token_latency_s=batch_size**0.3 / speed,
            )
        )
    return record_of(
        f"benchmarks/test_decode.py::test_decode[{backend}-{batch_size}]",
        rounds=rounds,
        params={"backend": backend, "batch_size": batch_size},
        backend=BackendInfo(name=backend, version="1.0", model="HuggingFaceTB/SmolLM2-135M-Instruct"),
    )


def load_curve() -> LoadCurve:
    """A search that found a maximum, with a limit that latencies cross steeply and one that they do not."""
    points = [
        LoadPoint(
            request_rate=rate,
            requests=100,
            rounds=rounds,
            requests_per_s=min(rate, 10.2),
            energy_per_output_token_j=0.2 + 1 / rate,
            energy_per_output_token_u_j=0.02 if rounds > 1 else None,
            time_to_first_token_p50_s=ttft_s / 2,
            time_to_first_token_p99_s=ttft_s,
            time_per_output_token_p50_s=0.02,
            time_per_output_token_p99_s=0.02 + rate / 1000,
            end_to_end_latency_p50_s=2.0,
            end_to_end_latency_p99_s=2.0 + ttft_s,
            slo_attainment=share,
            goodput_requests_per_s=min(rate, 10.2) * share,
            saturated=rate > 20,
            within_slo=share >= 0.99,
        )
        for rate, rounds, ttft_s, share in (
            (4.0, 1, 0.05, 1.0),
            (22.6, 1, 9.0, 0.1),
            (9.5, 1, 0.31, 1.0),
            (14.7, 1, 3.0, 0.4),
            (11.8, 2, 0.9, 0.8),
            (10.1, 3, 0.51, 0.98),
            (9.8, 3, 0.46, 0.99),
            (9.8, 6, 0.47, 0.99),
        )
    ]
    return LoadCurve(
        points=points,
        slo=slo(ttft=0.5, tpot=0.05),
        between=(0.5, 32.0),
        max_load_requests_per_s=9.8,
        exceeded_at_requests_per_s=10.1,
    )


#: Why a test failed, longer than any screen is wide.
LONG_REASON = "the answer has changed: " + " ".join(
    f"word{number}" if number % 9 else f"/a/path/without/spaces/{number}" * 4 for number in range(60)
)


def run_of() -> Report:
    """A run of parametrised tests, and of tests with windows only, without tokens and without a result."""
    rng = Random(3)
    decoded = [
        decode_record(backend, batch_size, rng)
        for backend in ("transformers", "llamacpp", "openvino")
        for batch_size in (1, 8, 32)
    ]
    plain = [
        record_of(
            f"benchmarks/test_text.py::test_{name}",
            rounds=[round_of(joules * rng.gauss(1, 0.02), tokens=None, requests=None) for _ in range(6)],
            params={},
            backend=None,
        )
        for name, joules in (("tokenize", 0.02), ("embed", 1.7), ("sort_a_very_long_list", 0.4))
    ]
    windows = [
        WindowRecord(
            name=name,
            start_s=3.0 * place,
            duration_s=1.5,
            energy_j=energy_j,
            energy_u_j=energy_j and energy_j * 0.02,
            energy_u_absolute_j=energy_j and energy_j * 0.05,
            by_domain={},
            reason=None if energy_j is not None else "shorter than a tick",
        )
        for place, (name, energy_j) in enumerate((("load", 2.5), ("prefill", 0.9), ("sampling", None)))
    ]
    lost = record_of("benchmarks/test_prefill.py::test_lost", [None] * 6)
    decoded[-1] = msgspec.structs.replace(decoded[-1], load_curve=load_curve())
    return report_of(
        *decoded,
        *plain,
        Record("benchmarks/test_pipeline.py::test_pipeline", 1, "measured", windows=windows),
        Record(id="benchmarks/test_answer.py::test_answer", attempt=1, status="failed", reason=LONG_REASON),
        Record(id="benchmarks/test_gpu.py::test_gpu[0]", attempt=1, status="skipped", reason="no GPU"),
        Record(id="benchmarks/test_gpu.py::test_gpu[1]", attempt=1, status="skipped", reason="no GPU"),
        msgspec.structs.replace(lost, status="invalid", reason="the counter stood still"),
    )


@cache
def run_shown() -> str:
    """The page of one run."""
    return render_report(run_of())


def odd(**changes: Any) -> Comparison:
    made = {
        "id": TEST,
        "metric": "energy_j",
        "unit": "J",
        "verdict": "regressed",
        "reason": "because",
        **changes,
    }
    return msgspec.convert(made, Comparison)
