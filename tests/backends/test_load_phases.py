# SPDX-License-Identifier: Apache-2.0
"""Steady state counted by hand, and saturation of servers whose capacity is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pytest_llenergy.backends.load_phases import load_phases, phase_spans, steady_span
from pytest_llenergy.record.timeline import RequestTimeline

from .queues import S, arrivals_s, queued, shared, shedding

MS = 1_000_000

Server = Callable[[int, Sequence[float]], list[RequestTimeline]]


def request(sent_ms: int, *token_ms: int) -> RequestTimeline:
    return RequestTimeline(
        input_tokens=3,
        output_tokens=len(token_ms),
        start_ns=sent_ms * MS,
        first_token_ns=token_ms[0] * MS,
        last_token_ns=token_ms[-1] * MS,
        token_ns=tuple(each * MS for each in token_ms),
    )


class TestSteadyState:
    #: Three requests of three tokens each; the second and third overlap.
    LOAD = (request(0, 100, 200, 300), request(250, 350, 450, 550), request(500, 560, 620, 680))

    def test_an_open_loop_is_steady_from_the_first_completion_to_the_last_send(self) -> None:
        assert steady_span(self.LOAD, None) == (300 * MS, 500 * MS)

    def test_a_closed_loop_is_steady_once_all_slots_have_a_token(self) -> None:
        assert steady_span(self.LOAD, 2) == (350 * MS, 500 * MS)

    def test_tokens_count_in_the_span_of_their_arrival(self) -> None:
        """The third token arrives at 300 ms, as the steady state begins, and counts in it."""
        ramp_up, steady, ramp_down = phase_spans(self.LOAD, None, -10 * MS, 700 * MS)
        assert [span.name for span in (ramp_up, steady, ramp_down)] == ["ramp-up", "steady", "ramp-down"]
        assert (ramp_up.start_ns, ramp_down.end_ns) == (-10 * MS, 700 * MS)
        assert [span.output_tokens for span in (ramp_up, steady, ramp_down)] == [2, 3, 4]


def verdict(requests: Sequence[RequestTimeline], concurrency: int | None = None) -> str:
    """Return the flag of a load, or ``steady``."""
    spans, flags = load_phases(requests, concurrency, 0, 10**15)
    assert bool(spans) == (not flags)
    return flags[0].name if flags else "steady"


def count(server: Server, slots: int, load: float, number: int, seeds: int = 20) -> Counter[str]:
    return Counter(verdict(server(slots, arrivals_s(slots, load, number, seed))) for seed in range(seeds))


class TestSaturation:
    @pytest.mark.parametrize("number", [32, 64, 128])
    @pytest.mark.parametrize("slots", [1, 2, 4])
    @pytest.mark.parametrize("load", [1.5, 2.0, 3.0])
    def test_a_queue_in_front_of_slots_is_found_in_20_of_20(
        self, slots: int, number: int, load: float
    ) -> None:
        assert count(queued, slots, load, number) == {"saturated": 20}

    @pytest.mark.parametrize("slots", [1, 2, 4])
    def test_a_small_overload_is_found_in_20_of_20_longer_loads(self, slots: int) -> None:
        assert count(queued, slots, 1.3, 64) == {"saturated": 20}

    @pytest.mark.parametrize("number", [64, 128])
    @pytest.mark.parametrize("slots", [1, 2, 4, 8])
    @pytest.mark.parametrize("load", [0.5, 0.7, 0.8])
    def test_a_server_that_keeps_up_is_steady_in_20_of_20(self, slots: int, number: int, load: float) -> None:
        assert count(queued, slots, load, number) == {"steady": 20}

    @pytest.mark.parametrize("load", [1.5, 2.0, 3.0])
    @pytest.mark.parametrize("slots", [1, 2, 4, 8])
    def test_a_server_that_takes_all_and_slows_down_has_no_steady_state(
        self, slots: int, load: float
    ) -> None:
        found = count(shared, slots, load, 64)
        assert "steady" not in found
        assert found["saturated"] >= 17

    def test_a_closed_loop_is_steady_for_twice_the_time_of_a_request(self) -> None:
        one_by_one = [request(1000 * number, 1000 * number + 50, 1000 * number + 1000) for number in range(4)]
        assert steady_span(one_by_one[:3], 1) == (50 * MS, 2000 * MS)
        assert verdict(one_by_one[:3], 1) == "short-load"
        assert verdict(one_by_one, 1) == "steady"

    def test_the_flag_states_what_was_asked_and_achieved(self) -> None:
        """6.8 requests/s are possible, 20 are asked for: the queue takes 32 / 6.8 - 32 / 20 seconds."""
        sent_s = arrivals_s(1, 20 / 6.8, 32, 0)
        _, (flag,) = load_phases(queued(1, sent_s), None, 0, 10**15)
        assert (flag.name, flag.severity) == ("saturated", "warning")
        assert flag.detail == "achieved 1 of 2.94 requests/s; lower the rate"

    def test_a_request_that_was_held_back_counts_from_when_it_was_due(self) -> None:
        """A client that waits for its turn would hide the queue."""
        sent_s = arrivals_s(1, 2.0, 32, 0)
        queue = queued(1, sent_s)
        held = [
            msgspec.structs.replace(each, start_ns=(each.first_token_ns or 0) - 250 * MS) for each in queue
        ]
        due_ns = [each.start_ns or 0 for each in queue]
        _, (flag,) = load_phases(held, None, 0, 10**15, due_ns, is_capped=True)
        assert flag.name == "saturated"
        assert flag.detail.endswith("; lower the rate or raise concurrency")

    def test_answers_of_unlike_length_in_flight_are_no_overload(self) -> None:
        """A server that serves everything at once is never overloaded. 36 are in flight of 144."""
        draw = random.Random(1)
        for seed in range(20):
            sent_s = arrivals_s(36, 1.0, 144, seed)
            services_s = [draw.expovariate(1.0) for _ in sent_s]
            assert verdict(queued(144, sent_s, services_s)) != "saturated"

    @pytest.mark.parametrize("load", [1.4, 2.0])
    def test_a_server_that_refuses_what_is_too_much_is_saturated(self, load: float) -> None:
        """It answers in time whatever it accepts, so that only the failures tell."""
        for seed in range(20):
            sent_s = arrivals_s(4, load, 200, seed)
            requests, refused = shedding(4, 4, sent_s)
            assert verdict(requests) == "steady"
            failed_ns = [round((10 + sent_s[place]) * S) for place in refused]
            spans, (flag,) = load_phases(requests, None, 0, 10**15, failed_ns=failed_ns)
            assert (flag.name, flag.severity, spans) == ("saturated", "warning", [])
            assert flag.detail == (
                f"{len(refused)} of 200 requests failed, asked for {4 * load:.3g} requests/s; lower the "
                "rate, or see failed-request"
            )

    def test_a_closed_loop_is_never_saturated(self) -> None:
        """Eight requests are in flight whatever the server does; two slots make them wait equally long."""
        sent_s = [0.0] * 8 + [float(number // 2 + 1) for number in range(56)]
        assert verdict(queued(2, sent_s), concurrency=8) == "steady"

    def test_a_short_load_is_not_called_saturated(self) -> None:
        spans, (flag,) = load_phases(queued(8, arrivals_s(8, 0.7, 8, 0)), None, 0, 10**15)
        assert spans == []
        assert (flag.name, flag.severity) == ("short-load", "note")
        assert flag.detail.endswith("; send more requests, so that it lasts 3 times as long")

    def test_too_few_requests_for_the_concurrency_are_no_steady_state(self) -> None:
        _, (flag,) = load_phases(queued(8, [0.0] * 4), 8, 0, 10**15)
        assert flag.detail == "4 requests never fill 8 places; send more"
