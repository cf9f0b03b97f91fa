# SPDX-License-Identifier: Apache-2.0
"""Time to first token and inter-token latency, per request and then averaged over requests."""

from __future__ import annotations

from statistics import fmean

from pytest_llenergy.model.record import ServedRequests
from pytest_llenergy.model.timeline import RequestTimeline, RoundTimeline


def time_to_first_token_s(timeline: RoundTimeline) -> float | None:
    """Mean TTFT over requests (seconds): from when the engine was given it to its first token."""
    waits: list[float] = []
    for iteration in (each for rank in timeline.ranks if not rank.repeats_others for each in rank.iterations):
        for request in iteration.requests:
            if request.first_token_ns is None:
                return None
            start_ns = iteration.start_ns if request.start_ns is None else request.start_ns
            waits.append((request.first_token_ns - start_ns) / 1e9)
    return fmean(waits) if waits else None


def inter_token_latency_s(timeline: RoundTimeline) -> float | None:
    """Mean over requests of the time between consecutive output tokens (seconds).

    Requests with one output token have no gap and are left out; ``None`` when that leaves none.
    """
    gaps: list[float] = []
    for request in timeline.requests:
        if request.first_token_ns is None or request.last_token_ns is None:
            return None
        if request.output_tokens > 1:
            span_s = (request.last_token_ns - request.first_token_ns) / 1e9
            gaps.append(span_s / (request.output_tokens - 1))
    return fmean(gaps) if gaps else None


def served_requests(timeline: RoundTimeline) -> ServedRequests | None:
    """The latencies of each request of a served load, to the microsecond; ``None`` for other work."""
    if not timeline.served:
        return None
    served: list[tuple[float, float, float | None, float, int]] = []
    for request in timeline.requests:
        sent_ns, first_ns, last_ns = request.start_ns, request.first_token_ns, request.last_token_ns
        if sent_ns is None or first_ns is None or last_ns is None:
            return None
        served.append(
            (
                _seconds(sent_ns - timeline.start_ns),
                _seconds(first_ns - sent_ns),
                _gap_s(request, last_ns - first_ns),
                _seconds(last_ns - sent_ns),
                request.output_tokens,
            )
        )
    served.sort(key=lambda each: each[0])
    return ServedRequests(
        sent_s=[each[0] for each in served],
        time_to_first_token_s=[each[1] for each in served],
        inter_token_latency_s=[each[2] for each in served],
        end_to_end_latency_s=[each[3] for each in served],
        output_tokens=[each[4] for each in served],
    )


def _gap_s(request: RequestTimeline, span_ns: int) -> float | None:
    return _seconds(span_ns / (request.output_tokens - 1)) if request.output_tokens > 1 else None


def _seconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1e9, 6)
