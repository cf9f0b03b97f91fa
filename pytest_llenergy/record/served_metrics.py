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

from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import RoundMetric, find_phase, joules, phase_energy, rate
from pytest_llenergy.record.round_statistics import RoundValue, percentile
from pytest_llenergy.record.served import SATURATED, SHORT_LOAD

#: Percentiles of each latency.
PERCENTILES = (50, 90, 99)

STEADY = "steady"

#: Source of the energies of requests.
ATTRIBUTED = "attributed: the power of each moment is shared among the requests that are active"

NO_LOAD = "the test serves no load"
NO_REQUESTS = "no request was served"
NO_TIMES = "the times of the requests are unknown"
UNKNOWN_CHUNKS = "the number of tokens in a chunk is unknown"
ONE_TOKEN = "no request has two tokens"


def _is_served(round_: Round) -> bool:
    return round_.served is not None


def _steady_per_token(round_: Round) -> RoundValue | None:
    phase, energy = find_phase(round_, STEADY), phase_energy(STEADY, round_)
    if phase is None or energy is None or not phase.output_tokens:
        return None
    # The energy is per iteration; the tokens are of all iterations.
    return energy.scale(round_.iterations / phase.output_tokens)


def _steady_throughput(round_: Round) -> RoundValue | None:
    phase = find_phase(round_, STEADY)
    if phase is None or phase.output_tokens is None:
        return None
    return rate(phase.output_tokens, phase.duration_s)


def _lacks_steady(round_: Round) -> str | None:
    phase = find_phase(round_, STEADY)
    if phase is None:
        reasons = [flag for flag in round_.flags if flag.name in (SATURATED, SHORT_LOAD)]
        return f"{reasons[0].name}: {reasons[0].detail}" if reasons else "the load has no steady state"
    return UNKNOWN_CHUNKS if phase.output_tokens is None else None


def _lacks_steady_energy(round_: Round) -> str | None:
    lacking, phase = _lacks_steady(round_), find_phase(round_, STEADY)
    if lacking is not None or phase is None:
        return lacking
    return phase.reason or (None if phase.output_tokens else "no tokens in the steady state")


def _request_throughput(round_: Round) -> RoundValue | None:
    return rate(round_.requests, round_.duration_s) if _is_served(round_) and round_.requests else None


def _latencies(column: str, rounds: Sequence[Round]) -> list[float]:
    """Return a latency of every request that has it."""
    served = [getattr(round_.served, column) for round_ in rounds if round_.served is not None]
    return [value for values in served for value in values if value is not None]


def _mean_latency(column: str, round_: Round) -> RoundValue | None:
    latencies = _latencies(column, [round_])
    return RoundValue(fmean(latencies)) if latencies else None


def _percentile(column: str, percent: int, rounds: Sequence[Round]) -> tuple[float, int]:
    latencies = _latencies(column, rounds)
    return (percentile(latencies, percent) if latencies else math.nan), len(latencies)


def _lacks_times(round_: Round) -> str | None:
    return None if _is_served(round_) else NO_TIMES


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


def _lacks_gaps(round_: Round) -> str | None:
    if round_.served is None:
        return NO_TIMES
    return UNKNOWN_CHUNKS if round_.served.token_gaps is None else None


def _of_round(pooled: Callable[[Sequence[Round]], tuple[float, int]], round_: Round) -> RoundValue | None:
    value, n = pooled([round_])
    return RoundValue(value) if n else None


def _pooled_metric(
    pooled: Callable[[Sequence[Round]], tuple[float, int]],
    missing: str,
    lacks: Callable[[Round], str | None],
) -> RoundMetric:
    return RoundMetric(
        "s",
        partial(_of_round, pooled),
        missing,
        applies=_is_served,
        lacks=lacks,
        pooled=pooled,
        optional=True,
        needs=NO_LOAD,
    )


def _percentiles(column: str, missing: str = NO_REQUESTS) -> dict[str, RoundMetric]:
    """Return the percentiles of one latency by name: ``time_to_first_token_p50_s`` and so on."""
    return {
        f"{column.removesuffix('_s')}_p{percent}_s": _pooled_metric(
            partial(_percentile, column, percent), missing, _lacks_times
        )
        for percent in PERCENTILES
    }


def _gap_percentiles() -> dict[str, RoundMetric]:
    return {
        f"inter_token_latency_p{percent}_s": _pooled_metric(
            partial(_gap_percentile, percent), ONE_TOKEN, _lacks_gaps
        )
        for percent in PERCENTILES
    }


def _request_energy(percent: int, round_: Round) -> RoundValue | None:
    found, whole = round_.request_energies, joules(round_, 1)
    value = getattr(found, f"p{percent}_j", None)
    if value is None or whole is None:
        return None
    accuracy = whole.accuracy * value / whole.value if whole.value else 0.0
    return RoundValue(value, getattr(found, f"p{percent}_u_j") or 0.0, accuracy=accuracy)


def _lacks_request_energy(round_: Round) -> str | None:
    found = round_.request_energies
    return NO_TIMES if found is None else found.reason


#: Every metric that only served loads have, in the order of the report.
SERVED_METRICS: dict[str, RoundMetric] = {
    "steady_energy_per_output_token_j": RoundMetric(
        "J/token",
        _steady_per_token,
        heading="steady per token ± u",
        applies=_is_served,
        phase=STEADY,
        lacks=_lacks_steady_energy,
        optional=True,
        needs=NO_LOAD,
    ),
    "steady_output_tokens_per_s": RoundMetric(
        "token/s",
        _steady_throughput,
        heading="steady token/s",
        better="more",
        applies=_is_served,
        lacks=_lacks_steady,
        optional=True,
        needs=NO_LOAD,
    ),
    "requests_per_s": RoundMetric(
        "request/s",
        _request_throughput,
        NO_REQUESTS,
        heading="request/s",
        better="more",
        applies=_is_served,
        optional=True,
        needs=NO_LOAD,
    ),
    **{
        f"energy_per_request_p{percent}_j": RoundMetric(
            "J/request",
            partial(_request_energy, percent),
            NO_REQUESTS,
            heading=f"request p{percent} (attributed) ± u",
            source=ATTRIBUTED,
            applies=lambda round_: round_.request_energies is not None,
            lacks=_lacks_request_energy,
            optional=True,
            needs=NO_LOAD,
        )
        for percent in PERCENTILES
    },
    "end_to_end_latency_s": RoundMetric(
        "s",
        partial(_mean_latency, "end_to_end_latency_s"),
        NO_REQUESTS,
        heading="end to end s",
        applies=_is_served,
        optional=True,
        needs=NO_LOAD,
    ),
    **_percentiles("time_to_first_token_s"),
    **_gap_percentiles(),
    **_percentiles("time_per_output_token_s", ONE_TOKEN),
    **_percentiles("end_to_end_latency_s"),
}
