# SPDX-License-Identifier: Apache-2.0
"""Time to first token and inter-token latency, per request and then averaged over requests."""

from __future__ import annotations

from statistics import fmean

from pytest_llenergy.model.timeline import RoundTimeline


def time_to_first_token_s(timeline: RoundTimeline) -> float | None:
    """Mean TTFT over requests (seconds): from the start of the iteration on its rank to its first token."""
    waits: list[float] = []
    for iteration in (each for rank in timeline.ranks for each in rank.iterations):
        for request in iteration.requests:
            if request.first_token_ns is None:
                return None
            waits.append((request.first_token_ns - iteration.start_ns) / 1e9)
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
