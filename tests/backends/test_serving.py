# SPDX-License-Identifier: Apache-2.0
"""Loads of requests: arrivals, latencies and steady state counted by hand; parsing of streams."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import stdev
from typing import Any

import pytest

from pytest_llenergy.backends.server.answers import (
    Answer,
    FailedRequestError,
    read_answer,
)
from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.server.events import iterate_events
from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.timeline import RequestTimeline

MS = 1_000_000


class TestArrivals:
    def test_the_last_request_is_sent_as_the_rate_says(self) -> None:
        offsets_s = ServeParams.parse({"request_rate": 4.0, "num_requests": 9}).offsets_s()
        assert len(offsets_s) == 9
        assert offsets_s[0] == 0
        assert offsets_s[-1] == pytest.approx(8 / 4.0)
        assert all(a < b for a, b in pairwise(offsets_s))

    @pytest.mark.parametrize("burstiness", [0.25, 4.0])
    def test_burstiness_is_the_shape_of_a_gamma_distribution(self, burstiness: float) -> None:
        """Its coefficient of variation is one over the root of the shape."""
        params = {"request_rate": 10.0, "num_requests": 4001, "burstiness": burstiness}
        offsets_s = ServeParams.parse(params).offsets_s()
        gaps_s = [b - a for a, b in pairwise(offsets_s)]
        assert offsets_s[-1] == pytest.approx(400)
        assert stdev(gaps_s) / 0.1 == pytest.approx(burstiness**-0.5, rel=0.1)

    def test_a_long_trace_is_recorded_by_its_digest(self) -> None:
        def recorded(*trace: float) -> object:
            return ServeParams.parse({"arrivals": "trace", "trace": trace}).primitives()["trace"]

        assert recorded(0.0, 1.5) == "0.0,1.5"
        times = [n / 8 for n in range(1000)]
        assert str(recorded(*times)).startswith("1000 values to 124.875, digest ")
        assert recorded(*times) == recorded(*times) != recorded(*times[:-2], 124.8, 124.875)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({}, "request_rate is None, needs one of request_rate, arrivals='trace' and concurrency"),
            (
                {"request_rate": 1.0, "arrivals": "trace", "trace": [0.0]},
                "request_rate is 1.0, needs one of request_rate, arrivals='trace' and concurrency",
            ),
            ({"concurrency": 1, "burstiness": 2.0}, "burstiness is 2.0, needs a request_rate"),
            ({"concurrency": 1, "endpoint": "chats"}, "endpoint: Invalid enum value 'chats'"),
            (
                {"slo": {"ttft": 1}},
                "serve: slo",
            ),
            ({"concurrency": 0}, "concurrency: Expected `int` >= 1"),
            ({"arrivals": "trace"}, "trace is (), needs finite seconds from the start, in ascending order"),
            ({"trace": [0, 1]}, "trace is (0.0, 1.0), needs arrivals='trace'"),
            (
                {"arrivals": "trace", "trace": [float("nan")]},
                "trace is (nan,), needs finite seconds",
            ),
            ({"arrivals": "trace", "trace": [2.0, 1.0]}, "trace is (2.0, 1.0), needs"),
            (
                {"arrivals": "trace", "trace": [1.0], "num_requests": 2},
                "num_requests is 2, needs to be left out: the trace says how many; see limit= of dataset()",
            ),
            ({"concurency": 1}, "request_timeout_s, slo; did you mean concurrency?"),
        ],
    )
    def test_invalid_arguments_are_refused(self, params: dict[str, Any], message: str) -> None:
        with pytest.raises(BackendError) as caught:
            ServeParams.parse(params)
        assert message in str(caught.value)


def event(text: str = "", **more: Any) -> bytes:
    finish = more.pop("finish", None)
    choice = {"text": text, "finish_reason": finish, **more.pop("choice", {})}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(prompt: int, made: int, **details: Any) -> dict[str, Any]:
    actual = {"prompt_tokens_details": details} if details else {}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": made, **actual}}


DONE = b"data: [DONE]\n\n"


def stream(*parts: tuple[int, bytes], status: int = 200, broke: str | None = None) -> Stream:
    return Stream(100 * MS, status, [(at_ms * MS, data) for at_ms, data in parts], broke)


def answer(*parts: tuple[int, bytes]) -> Answer:
    return read_answer(stream(*parts), "request 1 of 1")


def test_events_are_those_of_the_standard_however_they_arrive() -> None:
    """By the rules of the HTML standard; a last event without an empty line counts, too."""
    sent = (
        b"\xef\xbb\xbfdata: one\r\n\r\n: ping\ndata:two\ndata:  lines\revent: x\rid\r\rdata\n\n"
        b"data: \xc3\xa9\n\ndata: [DONE]"
    )
    whole = [data for _, data in iterate_events([(1, sent)])]
    assert whole == [b"one", b"two\n lines", "é".encode(), b"[DONE]"]
    assert [data for _, data in iterate_events([(1, sent)], ended=False)] == whole[:-1]
    for size in (1, 2, 3, 7):
        reads = [(place, sent[place : place + size]) for place in range(0, len(sent), size)]
        assert [data for _, data in iterate_events(reads)] == whole
    times = [at for at, _ in iterate_events([(at, sent[at : at + 1]) for at in range(len(sent))])]
    assert times[0] == sent.index(b"\r")


class TestStreams:
    def test_a_chunk_of_one_token_gives_its_timestamp(self) -> None:
        last = event(finish="length", **usage(3, 2, cached_tokens=0))
        got = answer((120, event("a")), (150, event("b")), (151, last), (151, DONE))
        assert got.text == "ab"
        assert got.exact
        assert got.request == RequestTimeline(
            input_tokens=3,
            output_tokens=2,
            start_ns=100 * MS,
            first_token_ns=120 * MS,
            last_token_ns=150 * MS,
            token_ns=(120 * MS, 150 * MS),
            cached_tokens=0,
        )
        assert got.token_ids == []

    def test_two_tokens_per_chunk_are_counted_by_the_servers_numbers(self) -> None:
        got = answer(
            *((120, event("ab", **usage(3, 2))), (160, event("cd", **usage(3, 4)))),
            *((160, event(finish="length")), (160, DONE)),
        )
        assert not got.exact
        assert got.request.token_ns == (120 * MS, 120 * MS, 160 * MS, 160 * MS)
        assert got.request.chunk_ns == (120 * MS, 160 * MS)

    def test_the_token_that_ends_a_sequence_has_no_text(self) -> None:
        got = answer((120, event("a")), (150, event(finish="stop", **usage(3, 2))), (150, DONE))
        assert got.request.token_ns == (120 * MS, 150 * MS)

    def test_a_missing_token_is_not_guessed(self) -> None:
        """Three chunks for four tokens: one of them may have two, unless a stop token has ended the text."""
        parts = [(110 + at, event(text)) for at, text in enumerate("abc")]
        for finish, is_known in (("length", False), ("stop", True)):
            got = answer(*parts, (150, event(finish=finish, **usage(3, 4))), (150, DONE))
            assert (got.exact, bool(got.request.token_ns)) == (is_known, is_known)

    def test_a_token_that_ends_the_reasoning_may_have_two_chunks(self) -> None:
        thought = event(choice={"delta": {"reasoning_content": "a"}})
        said = event("b", finish="stop", **usage(3, 1))
        assert answer((120, thought), (120, said), (121, DONE)).request.output_tokens == 1

    def test_llama_cpp_counts_in_its_timings(self) -> None:
        first = event("a", timings={"predicted_n": 1})
        second = event("é", timings={"predicted_n": 3})
        last = event(finish="length", timings={"predicted_n": 3}, **usage(2, 3))
        got = answer((120, first), (150, second), (150, last), (150, DONE))
        assert got.request.token_ns == (120 * MS, 150 * MS, 150 * MS)
        assert not got.exact

    def test_tokens_without_text_at_the_end_have_no_times(self) -> None:
        """As of llama.cpp, whose last tokens may be a part of a character."""
        counted = b'data: {"choices": [], %b\n\n' % json.dumps(usage(2, 3)).encode()[1:]
        first, last = event("a", timings={"predicted_n": 1}), event(finish="length")
        got = answer((120, first), (150, last), (150, counted), (150, DONE))
        assert (got.exact, got.request.token_ns, got.doubt) == (False, (), None)

    def test_token_ids_are_kept_if_the_server_returns_all(self) -> None:
        parts = [
            (120, event("a", choice={"token_ids": [7]}, **usage(1, 1))),
            (150, event("b", finish="length", choice={"token_ids": [9]}, **usage(1, 2))),
            (150, DONE),
        ]
        assert answer(*parts).token_ids == [7, 9]

    def test_token_ids_that_contradict_the_usage_have_no_times(self) -> None:
        parts = [(120 + at, event(text, choice={"token_ids": [7, 8]})) for at, text in enumerate("abc")]
        got = answer(*parts, (150, event(finish="length", **usage(1, 3))), (150, DONE))
        assert (got.exact, got.token_ids, got.request.token_ns) == (False, [], ())
        assert got.doubt == "the chunks have 6 token ids, and usage counts 3 tokens"

    @pytest.mark.parametrize(
        ("given", "kind", "message"),
        [
            (
                stream((120, event("a")), (130, event(finish="stop")), (130, DONE)),
                BackendError,
                "server: request 1 of 1: no usage in the stream, so tokens cannot be counted; the server "
                "must support stream_options.include_usage",
            ),
            (
                stream((120, event("a"))),
                BackendError,
                "server: request 1 of 1: the stream broke off after 1 chunk (no [DONE])",
            ),
            (
                stream((120, event("a")), broke="Connection lost"),
                BackendError,
                "server: request 1 of 1: the stream broke off after 1 chunk (Connection lost)",
            ),
            (
                stream(status=0, broke="refused"),
                BackendError,
                "server: request 1 of 1: no answer (refused)",
            ),
            (
                stream((120, b'{"error": {"message": "no such\\nmodel"}}'), status=404),
                BackendError,
                "server: request 1 of 1: 404 from /v1/completions: no such model; name it with "
                '@pytest.mark.backend_options(model="NAME")',
            ),
            (
                stream((120, b"<html>bad gateway</html>"), status=502),
                BackendError,
                "server: request 1 of 1: 502 from /v1/completions: <html>bad gateway</html>",
            ),
            (
                stream((120, b'data: {"error": {"message": "out of memory"}}\n\n')),
                BackendError,
                "server: request 1 of 1: out of memory",
            ),
            (
                stream((120, b"data: {broken\n\n")),
                BackendError,
                "server: request 1 of 1: a chunk is not JSON (",
            ),
            (
                stream((120, b'data: {"object": "error", "message": "too long", "code": 400}\n\n')),
                BackendError,
                "server: request 1 of 1: too long",
            ),
            (
                stream((120, event("a", finish="stop", **usage(0, 1))), (130, DONE)),
                BackendError,
                "server: request 1 of 1: usage counts no tokens in the prompt",
            ),
            (
                stream((120, event("a", finish="stop", **usage(2**64 - 1, 1))), (130, DONE)),
                BackendError,
                "server: request 1 of 1: its stream does not follow the OpenAI API (Expected `int` <= ",
            ),
        ],
        ids=[
            "no-usage",
            "ends-early",
            "breaks",
            "refused",
            "unknown-model",
            "gateway",
            "error",
            "no-json",
            "error-event",
            "no-prompt",
            "negative",
        ],
    )
    def test_an_invalid_answer_gives_a_one_line_error(
        self, given: Stream, kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind) as caught:
            read_answer(given, "request 1 of 1")
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)

    def test_a_prompt_that_is_counted_differently_within_a_stream_is_refused(self) -> None:
        parts = event("a", **usage(3, 1)), event("b", finish="length", **usage(9, 2)), DONE
        with pytest.raises(FailedRequestError, match="counts 3 tokens in the prompt, and later 9"):
            answer(*((120, part) for part in parts))

    @pytest.mark.parametrize(
        ("parts", "numbers"),
        [
            ([event("a", **usage(3, 1)), event("b", **usage(3, 1)), event(finish="length")], (1, 2)),
            ([event("ab", **usage(3, 4)), event("cd", finish="length")], (4, 1)),
        ],
        ids=["of-each-chunk", "before-the-end"],
    )
    def test_usage_that_contradicts_the_text_is_refused_with_both_numbers(
        self, parts: list[bytes], numbers: tuple[int, int]
    ) -> None:
        with pytest.raises(
            FailedRequestError, match=r"usage counts {} tokens, \w+ {} chunks".format(*numbers)
        ):
            answer(*((120, part) for part in parts), (150, DONE))

    @pytest.mark.parametrize(
        ("status", "is_rejected"),
        [(400, True), (413, True), (422, True), (408, False), (429, False), (503, False)],
    )
    @pytest.mark.parametrize("place", ["status", "stream"])
    def test_a_fault_of_the_request_is_told_from_a_busy_server(
        self, status: int, is_rejected: bool, place: str
    ) -> None:
        error = json.dumps({"error": {"message": "no", "code": status}}).encode()
        given = stream((120, error), status=status)
        if place == "stream":
            given = stream((120, b"data: " + error + b"\n\n"))
        with pytest.raises(FailedRequestError) as caught:
            read_answer(given, "request 1 of 1")
        assert caught.value.is_rejected is is_rejected
