# SPDX-License-Identifier: Apache-2.0
"""Loads like real traffic against a server that follows a script, so that every figure is known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.server.jobs import LoadJob
from pytest_llenergy.backends.tasks import ServedLoad, ServeParams
from pytest_llenergy.backends.traffic import Request, synthetic
from pytest_llenergy.backends.traffic.requests import complete_arguments
from pytest_llenergy.errors import BackendError

from .servers import start
from .servers.start import scripted

pytest.importorskip("aiohttp")


@contextmanager
def loaded(**settings: Any) -> Iterator[ServerBackend]:
    with start.loaded(command=scripted(**settings)) as (backend, _):
        yield backend


def prepare(backend: ServerBackend, inputs: Sequence[str | Request], **params: Any) -> LoadJob:
    checked = ServeParams.parse(complete_arguments("serve", inputs, params))
    return backend.prepare_serve(inputs, checked)


def served(backend: ServerBackend, inputs: Sequence[str | Request], **params: Any) -> ServedLoad:
    job = prepare(backend, inputs, **params)
    job.before_round()
    return job.result(job.run())


def asked(backend: ServerBackend, last: int) -> list[dict[str, Any]]:
    """What the server was asked last."""
    found: list[dict[str, Any]] = backend.client.get("/asked").json()["asked"][-last:]
    return found


def counts(made: ServedLoad) -> list[tuple[int, int]]:
    return [(each.input_tokens, each.output_tokens) for each in made.requests]


class TestLengths:
    @pytest.mark.slow
    def test_a_prompt_that_the_server_counts_otherwise_is_refused(self) -> None:
        with loaded() as backend:
            job = prepare(backend, synthetic(count=1, input_tokens=50), concurrency=1)
            job.requests[0] = Request(blocks=(("x", 49),), prompt="a" * 50)
            job.__post_init__()
            with pytest.raises(BackendError) as caught:
                job.result(job.run())
        assert str(caught.value) == (
            "server: request 1 of 1: the server counts 50 tokens in a prompt written to have 49; "
            "1 request failed, max_failures is 0"
        )


def test_messages_before_the_prompt_are_sent_with_it() -> None:
    """The completions endpoint gets one text."""
    history = (("system", "Be short."), ("user", "one"), ("assistant", "aa"))
    talk = Request(history=history, prompt="two", output_tokens=3)
    with loaded() as backend:
        made = served(backend, [talk], concurrency=1, endpoint="chat")
        (chat,) = asked(backend, 1)
        (plain,) = (served(backend, [talk], concurrency=1), asked(backend, 1))[1]
    assert [(each["role"], each["content"]) for each in chat["messages"]] == [*history, ("user", "two")]
    assert made.requests[0].output_tokens == 3
    assert plain["prompt"] == "Be short.\n\none\n\naa\n\ntwo"


class TestPace:
    def test_a_cap_holds_requests_back_and_the_wait_is_known(self) -> None:
        """Three requests are due at once, and each takes at least 0.2 s: the third waits for two of them."""
        with loaded(first=0.2) as backend:
            made = served(
                backend, ["a"], arrivals="trace", trace=[0.0, 0.0, 0.0], concurrency=1, max_new_tokens=1
            )
        waits_s = [((each.start_ns or 0) - (each.due_ns or 0)) / 1e9 for each in made.requests]
        assert waits_s[1] - waits_s[0] >= 0.2
        assert waits_s[2] - waits_s[1] >= 0.2
        (flag,) = (flag for flag in made.flags if flag.detail.startswith("concurrency="))
        # A busy host may hold the first back.
        found = re.match(r"concurrency=1 held back [23] of 3 requests, for up to ([\d.]+) s; ", flag.detail)
        assert found is not None, flag.detail
        assert 0.4 <= float(found[1]) <= waits_s[2] * 1.05
        assert "latencies, and an SLO, count from sending" in flag.detail


class TestFailures:
    LOAD = ("a", "b !500", "c", "d !drop", "e")

    def test_failures_up_to_the_limit_are_counted(self) -> None:
        with loaded() as backend:
            made = served(backend, self.LOAD, concurrency=1, num_requests=5, max_new_tokens=3, max_failures=2)
        assert [each.input_tokens for each in made.requests] == [1, 1, 1]
        assert made.failures[0] == "server: request 2 of 5: 500 from /v1/completions: out of memory"
        assert made.failures[1] == (
            "server: request 4 of 5: the stream broke off after 1 chunk (Response payload is not completed)"
        )
        (flag,) = (flag for flag in made.flags if flag.name == "failed-request")
        assert flag.detail.startswith("2 of 5 requests failed, and their joules count; the first: server: ")

    def test_one_more_ends_the_load_early(self) -> None:
        with loaded() as backend:
            job = prepare(backend, self.LOAD, concurrency=1, num_requests=5, max_failures=1, max_new_tokens=3)
            outcome = job.run()
            assert len(outcome.exchanges) == 4
            with pytest.raises(BackendError) as caught:
                job.result(outcome)
        assert str(caught.value) == (
            "server: request 2 of 5: 500 from /v1/completions: out of memory; 2 requests failed, "
            "max_failures is 1"
        )

    @pytest.mark.slow
    def test_a_time_out_is_a_failure(self) -> None:
        with loaded() as backend:
            made = served(
                backend,
                ["a", "!hang"],
                concurrency=2,
                num_requests=2,
                max_new_tokens=1,
                max_failures=1,
                request_timeout_s=5.0,
            )
        assert made.failures == ["server: request 2 of 2: no answer (not done after 5 s)"]


class TestPrefixCache:
    @pytest.mark.slow
    def test_hits_are_those_of_one_run(self) -> None:
        """Half of each prompt is shared: all but the first find it, in the second run as in the first."""
        traffic = synthetic(count=4, input_tokens=100, shared_prefix=0.5, output_tokens=1)
        with loaded(cached="prefix") as backend:
            job = prepare(backend, traffic, concurrency=1, prefix_cache=True)
            # Otherwise by the time of day, and now and then two texts begin alike.
            job._run = 1000
            runs = [job.result(job.run()) for _ in range(3)]
        for made in runs:
            cached = [each.cached_tokens or 0 for each in made.requests]
            # A word or two may agree by chance.
            assert cached[0] < 12
            assert all(48 <= each < 60 for each in cached[1:])
            assert made.cached_tokens == sum(cached)
            assert not any("cache" in flag.name for flag in made.flags)
        assert counts(runs[0]) == counts(runs[1]) == [(100, 1)] * 4
