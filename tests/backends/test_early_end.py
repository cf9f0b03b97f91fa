# SPDX-License-Identifier: Apache-2.0
"""Loads of a search that end early: what was sent is still answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.backends.server.backend import ServerBackend
from pytest_llenergy.backends.server.jobs import LoadJob, LoadOutcome
from pytest_llenergy.backends.tasks import Probe, ServedLoad, ServeParams
from pytest_llenergy.errors import BackendError, ServerError
from pytest_llenergy.record.load_curve import slo

from .servers.start import loaded, queueing

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
    warmups: int = 0,
    **params: object,
) -> LoadJob:
    """Prepare a load, of a search if ``allowed`` requests may miss the limits."""
    probe = None if allowed is None else Probe(warmups=warmups, allowed=allowed)
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
    assert "of 1000 requests sent, because too many had missed the SLO; " in flag.detail
    # All of them take ten seconds to send, and 25 to answer.
    assert (outcome.end_ns - outcome.start_ns) / 1e9 < 5
    assert (result.requests, result.texts, result.spans) == ([], [], [])


@pytest.mark.parametrize("allowed", [None, 1], ids=["round", "search"])
def test_a_server_that_died_before_a_load_is_reported(allowed: int | None) -> None:
    with loaded(command=queueing(), timeout_s=60) as (backend, _):
        load = job(backend, 20.0, 40, {"ttft": 60}, allowed=allowed)
        assert backend._process is not None
        psutil.Process(backend._process.pid).kill()
        with pytest.raises(ServerError, match="ended with signal SIGKILL"):
            load.before_round()


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
        _, result = run(job(backend, 400.0, 40, {"ttft": 5}, allowed=3, max_failures=1))
        (flag,) = result.flags
        assert (flag.name, flag.severity) == ("refused", "warning")
        assert "503 from /v1/completions: queue full; " in flag.detail
        assert flag.detail.endswith(" requests failed, max_failures is 1")
        assert (result.requests, result.texts, result.spans) == ([], [], [])
        with pytest.raises(BackendError, match=r"queue full; \d+ requests failed, max_failures is 1"):
            run(job(backend, 400.0, 40, {"ttft": 5}, max_failures=1))
        orders.write_text("")
        _, result = run(job(backend, 20.0, 5, {"ttft": 5}, allowed=3))
        assert len(result.requests) == 5
