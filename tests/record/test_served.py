# SPDX-License-Identifier: Apache-2.0
"""Accounting of a served load at known power: energy of its steady state, latencies of all rounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from pytest_llenergy.backends.load_phases import phase_spans
from pytest_llenergy.measure.accounting import token_gaps
from pytest_llenergy.record.metrics import ROUND_METRICS, compute_metrics
from pytest_llenergy.record.record import Flag, Round
from pytest_llenergy.record.round_statistics import percentile
from pytest_llenergy.record.served import TokenGaps
from pytest_llenergy.record.timeline import Iteration, RequestTimeline, Timeline

from ..energy.waves import MS, S, Sensor, Wave, read_at
from ..measure.marks import account_here, iteration, measured_round

START, END = 10 * S, 12 * S
#: The steady state: from the end of the first request (500 ms) to the sending of the last (1500 ms).
STEADY = START + 500 * MS, START + 1500 * MS
WAVE = Wave(((8 * S, 50.0), (START, 100.0), (STEADY[0], 300.0), (STEADY[1], 200.0), (END, 50.0)))
READS = range(8 * S + 5 * MS, 14 * S, MS)
LATCH = 20 * MS


def request(sent_ms: int, *token_ms: int) -> RequestTimeline:
    tokens = tuple(START + each * MS for each in token_ms)
    return RequestTimeline(
        input_tokens=3,
        output_tokens=len(tokens),
        start_ns=START + sent_ms * MS,
        first_token_ns=tokens[0],
        last_token_ns=tokens[-1],
        token_ns=tokens,
    )


#: Requests with eight tokens, four of them in the steady state.
REQUESTS = (
    request(0, 200, 500),
    request(400, 700, 900),
    request(800, 1000, 1600),
    request(1500, 1700, 1900),
)


def served(requests: tuple[RequestTimeline, ...] = REQUESTS, shift_ns: int = 0) -> Iteration:
    spans = phase_spans(requests, None, START, END)
    return Iteration(start_ns=START + shift_ns, end_ns=END, requests=requests, spans=tuple(spans))


def round_of(part: Iteration) -> Round:
    return account_here(measured_round(part), [read_at(Sensor(WAVE, LATCH), READS)])


def test_a_served_load_has_ramp_up_steady_and_ramp_down_phases() -> None:
    round_ = round_of(served())
    assert [phase.name for phase in round_.phases] == ["ramp-up", "steady", "ramp-down"]
    assert [phase.output_tokens for phase in round_.phases] == [1, 4, 3]
    assert [phase.duration_s for phase in round_.phases] == pytest.approx([0.5, 1.0, 0.5])
    joules = [phase.energy_j or 0.0 for phase in round_.phases]
    assert joules == pytest.approx([50, 300, 100], abs=5)
    assert sum(joules) == pytest.approx(round_.energy_j)


def test_steady_energy_per_token_matches_the_value_computed_by_hand() -> None:
    metrics = compute_metrics([round_of(served())], None)
    steady, whole = metrics["steady_energy_per_output_token_j"], metrics["energy_per_output_token_j"]
    assert steady.value == pytest.approx(300 / 4, abs=2)
    assert whole.value == pytest.approx(450 / 8, abs=1)
    assert metrics["steady_output_tokens_per_s"].value == pytest.approx(4 / 1.0)
    assert metrics["requests_per_s"].value == pytest.approx(4 / 2.0)


def test_the_steady_states_of_two_iterations_are_summed() -> None:
    """The load is repeated after two seconds: eight tokens in two seconds at 300 W."""
    later = [
        RequestTimeline(
            input_tokens=each.input_tokens,
            output_tokens=each.output_tokens,
            start_ns=(each.start_ns or 0) + 2 * S,
            first_token_ns=(each.first_token_ns or 0) + 2 * S,
            last_token_ns=(each.last_token_ns or 0) + 2 * S,
            token_ns=tuple(token_ns + 2 * S for token_ns in each.token_ns),
        )
        for each in REQUESTS
    ]
    again = Iteration(
        start_ns=END,
        end_ns=END + 2 * S,
        requests=tuple(later),
        spans=tuple(phase_spans(later, None, END, END + 2 * S)),
    )
    steps = [(time_ns, watts) for time_ns, watts in WAVE.steps if time_ns < END]
    steps += [(time_ns + 2 * S, watts) for time_ns, watts in WAVE.steps[1:]]
    series = read_at(Sensor(Wave(tuple(steps)), LATCH), range(8 * S + 5 * MS, 16 * S, MS))
    round_ = account_here(measured_round(served(), again), [series])
    assert round_.phases[1].output_tokens == 8
    assert round_.phases[1].duration_s == pytest.approx(2.0)
    assert sum(phase.duration_s for phase in round_.phases) == pytest.approx(round_.duration_s)
    per_token = compute_metrics([round_], None)["steady_energy_per_output_token_j"]
    assert per_token.value == pytest.approx(600 / 8, abs=2)


def test_latencies_match_the_values_computed_by_hand() -> None:
    round_ = round_of(served())
    assert round_.served is not None
    assert round_.served.sent_s == [0.0, 0.4, 0.8, 1.5]
    assert round_.served.time_to_first_token_s == [0.2, 0.3, 0.2, 0.2]
    assert round_.served.time_per_output_token_s == [0.3, 0.2, 0.6, 0.2]
    assert round_.served.token_gaps == TokenGaps(gap_s=[0.2, 0.3, 0.6], count=[2, 1, 1])
    assert round_.served.end_to_end_latency_s == [0.5, 0.5, 0.8, 0.4]
    metrics = compute_metrics([round_], None)
    assert metrics["time_to_first_token_s"].value == pytest.approx(0.225)
    assert metrics["end_to_end_latency_s"].value == pytest.approx(0.55)
    assert metrics["end_to_end_latency_p50_s"].value == pytest.approx(0.5)
    # One gap in each request, so that both are the same.
    assert metrics["inter_token_latency_p90_s"].value == pytest.approx(0.51)
    assert metrics["time_per_output_token_p90_s"].value == pytest.approx(0.51)


def stalling(every: int) -> tuple[RequestTimeline, ...]:
    """Return 32 requests with a token each 10 ms, of which some pause for 150 ms before their last."""
    tokens = [10 * number for number in range(20)]
    return tuple(
        request(10 * number, *tokens[:-1], tokens[-1] + (142 if number % every == 0 else 0))
        for number in range(32)
    )


def test_stalls_show_in_the_gaps_and_not_in_the_means_of_requests() -> None:
    """Every fourth request stalls: 8 gaps of 152 ms among 608, more than one in a hundred."""
    metrics = compute_metrics([round_of(served(stalling(4)))] * 3, None)
    gaps = metrics["inter_token_latency_p99_s"]
    assert gaps.value == pytest.approx(0.152)
    assert (gaps.n, gaps.rounds) == (3 * 32 * 19, 3)
    assert metrics["inter_token_latency_p50_s"].value == pytest.approx(0.010)
    per_token = metrics["time_per_output_token_p99_s"]
    assert per_token.value == pytest.approx((18 * 0.010 + 0.152) / 19, abs=1e-6)
    assert (per_token.n, per_token.rounds) == (3 * 32, 3)


def test_percentiles_of_gaps_are_those_of_numpy() -> None:
    """Between the same order statistics: gaps of 10 ms, and one of 110 ms in each ten."""
    requests = tuple(request(0, *(10 * number for number in range(10)), 200) for _ in range(3))
    metrics = compute_metrics([round_of(served(requests))], None)
    gaps_s = sorted([0.01] * 9 + [0.11]) * 3
    for percent in (50, 90, 99):
        found = metrics[f"inter_token_latency_p{percent}_s"].value
        assert found == pytest.approx(percentile(sorted(gaps_s), percent))


def test_tokens_of_one_chunk_have_no_gap_between_them() -> None:
    pair = request(0, 100, 100, 150, 150)
    # Two chunks that were read at once.
    assert token_gaps([pair]) == TokenGaps(gap_s=[0.0, 0.05], count=[2, 1])
    pair = msgspec.structs.replace(pair, chunk_ns=(pair.token_ns[0], pair.token_ns[2]))
    found = token_gaps([pair])
    assert found == TokenGaps(gap_s=[0.05], count=[1])
    # Four tokens in 50 ms after the first.
    metrics = compute_metrics([round_of(served((pair, pair)))], None)
    assert metrics["time_per_output_token_p50_s"].value == pytest.approx(0.05 / 3, abs=1e-6)
    assert metrics["inter_token_latency_p50_s"].value == pytest.approx(0.05)
    assert metrics["inter_token_latency_p50_s"].n == 2


def test_unknown_chunks_in_one_round_leave_the_gaps_without_a_value() -> None:
    without_times = tuple(msgspec.structs.replace(each, token_ns=()) for each in REQUESTS)
    metrics = compute_metrics([round_of(served()), round_of(served(without_times))], None)
    for name in ("inter_token_latency_p50_s", "inter_token_latency_p99_s"):
        reason = "1 of 2 rounds: the number of tokens in a chunk is unknown"
        assert (metrics[name].value, metrics[name].reason) == (None, reason)
    # The first and the last token have times.
    assert metrics["time_per_output_token_p99_s"].value is not None


def test_requests_of_one_token_have_no_time_per_output_token() -> None:
    metrics = compute_metrics([round_of(served((request(0, 100), request(50, 200))))], None)
    for name in ("inter_token_latency_p50_s", "time_per_output_token_p50_s"):
        assert (metrics[name].value, metrics[name].reason) == (None, "no request has two tokens")


def test_gaps_of_ten_thousands_of_tokens_stay_small_in_a_report() -> None:
    """Three digits of each gap: 0.5 % at most, and a few kilobytes in place of 45."""
    draw = random.Random(0)
    requests = []
    for number in range(32):
        times_us, now = [], 0.0
        for _ in range(257):
            now += draw.lognormvariate(math.log(17.5e3), 0.2)
            times_us.append(round(now))
        token_ns = tuple(START + 1000 * each for each in times_us)
        requests.append(msgspec.structs.replace(request(number, 0), output_tokens=257, token_ns=token_ns))
    found = token_gaps(requests)
    assert found is not None
    assert sum(found.count) == 32 * 256
    assert len(msgspec.json.encode(found)) < 6000
    exact = [(b - a) / 1e9 for each in requests for a, b in pairwise(each.token_ns)]
    pooled = [gap_s for gap_s, count in zip(found.gap_s, found.count, strict=True) for _ in range(count)]
    for percent in (50, 90, 99):
        assert percentile(pooled, percent) == pytest.approx(percentile(sorted(exact), percent), rel=0.005)


def test_percentiles_cover_the_requests_of_all_valid_rounds() -> None:
    """The median of all nine latencies is 1.0 s; the mean of the medians of the two rounds is not."""
    slow = (request(0, 500, 1000), *(request(500, 700, 1500) for _ in range(4)))
    rounds = [round_of(served()), round_of(served(slow))]
    p50 = compute_metrics(rounds, None)["end_to_end_latency_p50_s"]
    assert p50.value == pytest.approx(1.0)
    assert (p50.n, p50.rounds) == (9, 2)
    assert p50.uncertainty is not None
    assert p50.uncertainty > 0
    flag = Flag(name="gpu-processes", severity="invalid", detail="x")
    bad = msgspec.structs.replace(rounds[1], flags=[flag])
    alone = compute_metrics([rounds[0], bad], None)["end_to_end_latency_p50_s"]
    assert alone.value == pytest.approx(0.5)


def test_a_load_without_a_steady_state_gives_the_reason_and_no_phases() -> None:
    round_ = round_of(served(REQUESTS[:1]))
    assert round_.phases == []
    metric = compute_metrics([round_], None)["steady_energy_per_output_token_j"]
    assert metric.value is None
    assert metric.reason is not None
    assert "no steady state" in metric.reason


def test_tokens_without_timestamps_give_no_steady_metrics() -> None:
    without_times = tuple(msgspec.structs.replace(each, token_ns=()) for each in REQUESTS)
    round_ = round_of(served(without_times))
    assert [phase.output_tokens for phase in round_.phases] == [None, None, None]
    assert compute_metrics([round_], None)["steady_energy_per_output_token_j"].value is None
    assert compute_metrics([round_], None)["energy_per_output_token_j"].value is not None


def test_other_work_has_no_metrics_of_a_served_load() -> None:
    metrics = compute_metrics([round_of(iteration(START, END, STEADY[0]))], None)
    assert [name for name, figure in ROUND_METRICS.items() if figure.optional and name in metrics] == []


def test_flags_of_the_backend_become_flags_of_the_round() -> None:
    flag = Flag(name="late-request", severity="warning", detail="a request was sent 90 ms after its time")
    plain = measured_round(served())
    rank = msgspec.structs.replace(plain.timeline.ranks[0], flags=(flag, flag))
    round_ = account_here(
        replace(plain, timeline=Timeline(ranks=(rank,))), [read_at(Sensor(WAVE, LATCH), READS)]
    )
    assert round_.flags == [flag]
