# SPDX-License-Identifier: Apache-2.0
"""Metrics of served loads: rates, the steady state, and latencies as other benchmarks of serving define them.

Percentiles are taken over the requests, or the gaps between tokens, of all valid rounds. Their uncertainty
comes from the scatter of the percentiles of single rounds.

``time_to_first_token`` (TTFT)
    From sending a request to its first token.
``time_per_output_token`` (TPOT)
    Of a request, (end-to-end latency - time to first token) / (output tokens - 1): ``tpot`` of ``vllm bench
    serve`` (github.com/vllm-project/vllm, vllm/benchmarks/serve.py, ``calculate_metrics``). GenAI-Perf and
    AIPerf call it inter-token latency (docs.nvidia.com/aiperf, Metrics Reference).
``inter_token_latency`` (ITL)
    Every gap between consecutive tokens of every request: ``itl`` of ``vllm bench serve``, and inter-chunk
    latency of AIPerf. Only here does a stall show.
``end_to_end_latency`` (E2E)
    From sending a request to its last token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import fmean

from pytest_llenergy.record.record import Phase, Round
from pytest_llenergy.record.round_metric import RoundMetric, find_phase, part_of_energy, phase_energy, rate
from pytest_llenergy.record.round_statistics import RoundValue, percentile
from pytest_llenergy.record.served import SATURATED, SHORT_LOAD

#: Returns a metric of several rounds together, and of how many values it is.
Pooled = Callable[[Sequence[Round]], tuple[float, int]]

#: Percentiles of each latency.
PERCENTILES = (50, 90, 99)

STEADY = "steady"

#: Source of the energies of requests.
ATTRIBUTED = "attributed: the power of each moment is shared among the requests that are active"

NO_LOAD = "the test serves no load"
NO_REQUESTS = "no request was served"
UNKNOWN_CHUNKS = "the number of tokens in a chunk is unknown"
ONE_TOKEN = "no request has two tokens"


def _steady_phase(round_: Round) -> Phase | str:
    """Return the steady state of a load whose tokens are known, or why there is none."""
    if round_.served is None:
        return NO_LOAD
    phase = find_phase(round_, STEADY)
    if phase is None:
        reasons = (
            f"{flag.name}: {flag.detail}" for flag in round_.flags if flag.name in (SATURATED, SHORT_LOAD)
        )
        return next(reasons, "the load has no steady state")
    return UNKNOWN_CHUNKS if phase.output_tokens is None else phase


def _steady_per_token(round_: Round) -> RoundValue | str:
    phase = _steady_phase(round_)
    if isinstance(phase, str) or not phase.output_tokens:
        return phase if isinstance(phase, str) else "no tokens in the steady state"
    energy = phase_energy(round_, phase)
    # The energy is per iteration; the tokens are of all iterations.
    return energy if isinstance(energy, str) else energy.scale(round_.iterations / phase.output_tokens)


def _steady_throughput(round_: Round) -> RoundValue | str:
    phase = _steady_phase(round_)
    return phase if isinstance(phase, str) else rate(phase.output_tokens or 0, phase.duration_s)


def _request_throughput(round_: Round) -> RoundValue | str:
    if round_.served is None:
        return NO_LOAD
    return rate(round_.requests, round_.duration_s) if round_.requests else NO_REQUESTS


def _latencies(column: str, rounds: Sequence[Round]) -> list[float]:
    """Return a latency of every request that has it."""
    served = [getattr(round_.served, column) for round_ in rounds if round_.served is not None]
    return [value for values in served for value in values if value is not None]


def _mean_latency(round_: Round) -> RoundValue | str:
    if round_.served is None:
        return NO_LOAD
    latencies = round_.served.end_to_end_latency_s
    return RoundValue(fmean(latencies)) if latencies else NO_REQUESTS


def _percentile(column: str, percent: int, rounds: Sequence[Round]) -> tuple[float, int]:
    latencies = _latencies(column, rounds)
    return (percentile(latencies, percent) if latencies else math.nan), len(latencies)


def _gap_percentile(percent: int, rounds: Sequence[Round]) -> tuple[float, int]:
    """Return a percentile of gaps by linear interpolation, as ``round_statistics.percentile`` does."""
    counts: Counter[float] = Counter()
    for round_ in rounds:
        gaps = round_.served.token_gaps if round_.served is not None else None
        if gaps is not None:
            for gap_s, count in zip(gaps.gap_s, gaps.count, strict=False):
                counts[gap_s] += count
    ordered = sorted(gap_s for gap_s, count in counts.items() if count)
    ends = list(accumulate(counts[gap_s] for gap_s in ordered))
    if not ends:
        return math.nan, 0
    place, part = divmod((ends[-1] - 1) * percent, 100)
    low_s = ordered[bisect_right(ends, place)]
    high_s = ordered[bisect_right(ends, min(place + 1, ends[-1] - 1))]
    return low_s + (high_s - low_s) * part / 100, ends[-1]


def _pooled(pooled: Pooled, missing: str, of_gaps: bool, round_: Round) -> RoundValue | str:
    """Return what ``pooled`` returns for one round."""
    if round_.served is None or (of_gaps and round_.served.token_gaps is None):
        return NO_LOAD if round_.served is None else UNKNOWN_CHUNKS
    value, n = pooled([round_])
    return RoundValue(value) if n else missing


def _percentiles(latency: str, missing: str, *, of_gaps: bool = False) -> dict[str, RoundMetric]:
    """Return the percentiles of one latency by name: ``time_to_first_token_p50_s`` and so on."""
    metrics = {}
    for percent in PERCENTILES:
        pooled = partial(_gap_percentile if of_gaps else partial(_percentile, f"{latency}_s"), percent)
        of = partial(_pooled, pooled, missing, of_gaps)
        metrics[f"{latency}_p{percent}_s"] = RoundMetric(
            "s", of, NO_LOAD, pooled=pooled, every=of_gaps, optional=True
        )
    return metrics


def _request_energy(percent: int, round_: Round) -> RoundValue | str:
    found = round_.request_energies
    value = getattr(found, f"p{percent}_j", None)
    if found is None or value is None:
        return NO_LOAD if found is None else found.reason or NO_REQUESTS
    return part_of_energy(round_, value, getattr(found, f"p{percent}_u_j") or 0.0)


def _energy_percentile(percent: int) -> RoundMetric:
    of, heading = partial(_request_energy, percent), f"request p{percent} (attributed) ± u"
    return RoundMetric("J/request", of, NO_LOAD, heading, every=True, optional=True, source=ATTRIBUTED)


#: Every metric that only served loads have, in the order of the report.
SERVED_METRICS: dict[str, RoundMetric] = {
    "steady_energy_per_output_token_j": RoundMetric(
        "J/token",
        _steady_per_token,
        NO_LOAD,
        "steady per token ± u",
        phase=STEADY,
        every=True,
        optional=True,
    ),
    "steady_output_tokens_per_s": RoundMetric(
        "token/s", _steady_throughput, NO_LOAD, "steady token/s", "more", every=True, optional=True
    ),
    "requests_per_s": RoundMetric(
        "request/s", _request_throughput, NO_LOAD, "request/s", "more", optional=True
    ),
    **{f"energy_per_request_p{percent}_j": _energy_percentile(percent) for percent in PERCENTILES},
    "end_to_end_latency_s": RoundMetric("s", _mean_latency, NO_LOAD, "end to end s", optional=True),
    **_percentiles("time_to_first_token", NO_REQUESTS),
    **_percentiles("inter_token_latency", ONE_TOKEN, of_gaps=True),
    **_percentiles("time_per_output_token", ONE_TOKEN),
    **_percentiles("end_to_end_latency", NO_REQUESTS),
}
