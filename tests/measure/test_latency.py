# SPDX-License-Identifier: Apache-2.0
"""Latencies counted by hand for sequences of unequal length."""

from __future__ import annotations

import pytest

from pytest_llenergy.measure.accounting import inter_token_latency_s, time_to_first_token_s
from pytest_llenergy.model.timeline import Iteration, RankTimeline, RequestTimeline, RoundTimeline

from ..meters.waves import MS


def request(output_tokens: int, first_ms: int | None, last_ms: int | None) -> RequestTimeline:
    return RequestTimeline(
        input_tokens=5,
        output_tokens=output_tokens,
        first_token_ns=None if first_ms is None else first_ms * MS,
        last_token_ns=None if last_ms is None else last_ms * MS,
    )


def round_of(*ranks: tuple[int, list[RequestTimeline]]) -> RoundTimeline:
    return RoundTimeline(
        ranks=tuple(
            RankTimeline(
                rank=i,
                iterations=(Iteration(start_ns=start * MS, end_ns=5000 * MS, requests=tuple(requests)),),
                cpu_time_s=0.0,
            )
            for i, (start, requests) in enumerate(ranks)
        )
    )


def test_unequal_lengths_on_two_ranks() -> None:
    timeline = round_of(
        (1000, [request(16, 1100, 1850), request(1, 1100, 1100)]),
        (1040, [request(3, 1340, 1440)]),
    )
    # 100 and 100 ms from the start of the first rank, 300 ms from that of the second.
    assert time_to_first_token_s(timeline) == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    # 750 ms over 15 gaps, 100 ms over 2; one token has no gap.
    assert inter_token_latency_s(timeline) == pytest.approx((0.05 + 0.05) / 2)


def test_requests_weigh_the_same_however_long() -> None:
    timeline = round_of((0, [request(101, 0, 1000), request(2, 0, 30)]))
    assert inter_token_latency_s(timeline) == pytest.approx((0.01 + 0.03) / 2)


def test_single_tokens_have_a_first_but_no_gap() -> None:
    timeline = round_of((0, [request(1, 40, 40)]))
    assert time_to_first_token_s(timeline) == pytest.approx(0.04)
    assert inter_token_latency_s(timeline) is None


@pytest.mark.parametrize(
    "requests", [[], [request(4, None, None)], [request(4, 1, 9), request(4, None, None)]]
)
def test_what_the_engine_does_not_tell_is_not_made_up(requests: list[RequestTimeline]) -> None:
    timeline = round_of((0, requests))
    assert time_to_first_token_s(timeline) is None
    assert inter_token_latency_s(timeline) is None
