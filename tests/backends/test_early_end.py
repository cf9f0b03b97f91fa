# SPDX-License-Identifier: Apache-2.0
"""Loads of a search that end early: what was sent is still answered."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.server.jobs import LoadJob, LoadOutcome, MissCounter
from pytest_llenergy.backends.tasks import Probe, ServedLoad, ServeParams
from pytest_llenergy.errors import BackendError, ServerError
from pytest_llenergy.record.load_curve import slo

from .servers.start import loaded, queueing, running

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def backend() -> Iterator[ServerBackend]:
    """Two slots of 50 ms: 40 requests per second."""
    with loaded(command=queueing(slots=2, service=0.05)) as (backend, _):
        yield backend


def job(
    backend: ServerBackend,
    rate: float,
    requests: int,
    limits: dict[str, float],
    *,
    allowed: int | None = None,
    seconds: float = 100.0,
    warmups: int = 0,
    **params: object,
) -> LoadJob:
    """Prepare a load, of a search if ``allowed`` requests may miss the limits."""
    probe = None
    if allowed is not None:
        probe = Probe(
            warmups=warmups,
            allowed=allowed,
            requests=requests,
            end_ns=time.monotonic_ns() + round(seconds * 1e9),
            longest_s=100.0,
        )
    asked = {"request_rate": rate, "num_requests": requests, "max_new_tokens": 3, **params}
    parsed = ServeParams.parse(asked)
    return backend.prepare_serve(
        ["abc"],
        ServeParams(**{**_fields(parsed), "slo": slo(**limits), "probe": probe}),  # type: ignore[arg-type]
    )


def _fields(params: ServeParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def run(load: LoadJob) -> tuple[LoadOutcome, ServedLoad]:
    load.before_round()
    outcome = load.run()
    return outcome, load.result(outcome)


@pytest.mark.parametrize("limits", [{"ttft": 0.2}, {"e2e": 0.2}], ids=["ttft", "e2e"])
def test_a_load_ends_when_more_requests_have_missed_the_slo_than_may(
    backend: ServerBackend, limits: dict[str, float]
) -> None:
    outcome, result = run(job(backend, 100.0, 1000, limits, allowed=3))
    (flag,) = result.flags
    assert (flag.name, flag.severity) == ("ended-early", "warning")
    assert "missed the SLO, and 3 of 1000 may" in flag.detail
    # All of them take ten seconds to send, and 25 to answer.
    assert (outcome.end_ns - outcome.start_ns) / 1e9 < 5
    assert (result.requests, result.texts, result.spans) == ([], [], [])


def test_the_next_load_finds_an_idle_server(backend: ServerBackend) -> None:
    """The server has taken some 80 requests when the first load ends, which it serves in two seconds."""
    outcome, _ = run(job(backend, 400.0, 200, {"ttft": 0.2}, allowed=3))
    assert outcome.ended is not None
    assert not any(each.stream.failed for each in outcome.exchanges)
    _, result = run(job(backend, 20.0, 20, {"ttft": 5}, allowed=3))
    assert _shortest_wait_s(result) < 0.8


def _shortest_wait_s(result: ServedLoad) -> float:
    """On a server that is not idle all wait, and on a busy host any may."""
    return min((each.first_token_ns or 0) - (each.start_ns or 0) for each in result.requests) / 1e9


def test_a_load_ends_when_its_time_is_up(backend: ServerBackend) -> None:
    _, result = run(job(backend, 10.0, 1000, {"ttft": 5}, allowed=3, seconds=1.0))
    (flag,) = result.flags
    assert flag.name == "out-of-time"
    assert "of 1000 requests sent, because its time was up" in flag.detail


def test_a_request_without_any_answer_has_missed_the_limit_of_its_end() -> None:
    counter = MissCounter(slo(e2e=0.05), allowed=0, last_ns=2**62)
    counter.watch(Stream(sent_ns=time.monotonic_ns()))
    assert not counter.is_over()
    counter.watch(Stream(sent_ns=time.monotonic_ns() - 10**9))
    assert counter.is_over()


def test_what_the_end_of_the_load_cuts_off_has_missed_nothing() -> None:
    counter = MissCounter(slo(ttft=60.0), allowed=0, last_ns=time.monotonic_ns())
    counter.watch(Stream(sent_ns=time.monotonic_ns(), broke="not done after 1 s", ended=True))
    assert not counter.is_over()


@pytest.mark.parametrize("max_failures", [0, 1000])
def test_a_server_elsewhere_that_dies_in_a_search_is_an_error(max_failures: int) -> None:
    """Even if failures may be many, so that those miss the SLO and end the load."""
    with running(queueing(slots=20, service=1)) as (url, process), loaded(url=url) as (backend, _):
        load = job(backend, 20.0, 40, {"ttft": 60}, allowed=1, max_failures=max_failures)
        load.before_round()
        load.endpoint.client._loop.call_later(0.5, process.kill)
        outcome = load.run()
        with pytest.raises(BackendError, match=f"nobody listens at {url} anymore"):
            load.result(outcome)


def test_requests_that_are_still_open_when_the_time_is_up_are_closed(backend: ServerBackend) -> None:
    load = job(backend, 400.0, 200, {"ttft": 60}, allowed=3)
    load.before_round()
    load._last_ns = time.monotonic_ns() + 10**9
    outcome = load.run()
    assert 0.9 < (outcome.end_ns - outcome.start_ns) / 1e9 < 3
    ended, failed = load.result(outcome).flags
    assert (ended.name, failed.name) == ("out-of-time", "failed-request")


@pytest.mark.parametrize("allowed", [None, 1], ids=["round", "search"])
def test_a_server_that_died_before_a_load_is_reported(allowed: int | None) -> None:
    with loaded(command=queueing(), timeout_s=60) as (backend, _):
        load = job(backend, 20.0, 40, {"ttft": 60}, allowed=allowed)
        assert backend._process is not None
        psutil.Process(backend._process.pid).kill()
        with pytest.raises(ServerError, match="ended with signal SIGKILL"):
            load.before_round()


@pytest.mark.parametrize("order", ["bad", "error"])
def test_a_request_that_is_faulty_at_any_load_is_an_error(tmp_path: Path, order: str) -> None:
    """Whether the server refuses it, or reports the error in its stream."""
    orders = tmp_path / "orders"
    orders.write_text("")
    with loaded(command=queueing(slots=2, service=0.05, orders=orders)) as (backend, _):
        load = job(backend, 400.0, 20, {"ttft": 60}, allowed=20, max_failures=1000)
        load.before_round()
        orders.write_text(order)
        outcome = load.run()
        with pytest.raises(BackendError) as caught:
            load.result(outcome)
    # Subclasses would be shown with a traceback of the plugin.
    assert type(caught.value) is BackendError
    assert re.fullmatch(
        r"server: request \d+ of 20: (400 from /v1/completions: )?too long; the server rejects it at any "
        "load, not only at 400 request/s, so max_failures does not apply",
        str(caught.value),
    )


def test_a_load_that_ends_early_says_which_of_its_requests_failed(tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.write_text("refuse")
    with loaded(command=queueing(slots=2, service=0.05, orders=orders)) as (backend, _):
        outcome, result = run(job(backend, 400.0, 200, {"ttft": 60}, allowed=3, max_failures=1000))
    ended, failed = result.flags
    assert (ended.name, failed.name, failed.severity) == ("ended-early", "failed-request", "warning")
    refused = sum(each.stream.failed for each in outcome.exchanges)
    assert failed.detail.startswith(f"{refused} of {len(outcome.exchanges)} requests failed, ")
    assert " of 200: 503 from /v1/completions: queue full" in failed.detail


def test_rounds_of_a_search_have_different_arrivals(backend: ServerBackend) -> None:
    """Round k has those of seed + k, whatever the warm-up was, which is short."""
    load = job(backend, 200.0, 40, {"ttft": 5}, allowed=40, warmups=1, seed=7)
    warmup, *rounds = (run(load)[0] for _ in range(3))
    assert len(warmup.exchanges) == 32
    for number, outcome in enumerate(rounds):
        sent_s = [((each.due_ns or 0) - outcome.start_ns) / 1e9 for each in outcome.exchanges]
        expected = ServeParams(request_rate=200.0, num_requests=40, seed=7 + number).offsets_s()
        assert sent_s == pytest.approx(expected, abs=1e-6)


def test_too_many_failures_are_a_result_in_a_search_and_an_error_elsewhere(tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.write_text("refuse")
    with loaded(command=queueing(slots=2, service=0.05, orders=orders)) as (backend, _):
        outcome, result = run(job(backend, 400.0, 40, {"ttft": 5}, allowed=3, max_failures=1))
        (flag,) = result.flags
        assert (outcome.ended, flag.name, flag.severity) == (None, "refused", "warning")
        assert "503 from /v1/completions: queue full; " in flag.detail
        assert flag.detail.endswith(" requests failed, max_failures is 1")
        assert (result.requests, result.texts, result.spans) == ([], [], [])
        with pytest.raises(BackendError, match=r"queue full; \d+ requests failed, max_failures is 1"):
            run(job(backend, 400.0, 40, {"ttft": 5}, max_failures=1))
        orders.write_text("")
        _, result = run(job(backend, 20.0, 5, {"ttft": 5}, allowed=3))
        assert len(result.requests) == 5
