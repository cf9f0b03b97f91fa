# SPDX-License-Identifier: Apache-2.0
"""Jobs of the server backend: send batches and loads, which in a search end once their result is certain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from pytest_llenergy.backends.load_phases import load_phases
from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.server.dialects import Encoder
from pytest_llenergy.backends.server.endpoint import (
    Endpoint,
    Exchange,
    answer_flags,
)
from pytest_llenergy.backends.tasks import (
    DEFAULT_REQUESTS,
    Generation,
    GenerationParams,
    Probe,
    ServedLoad,
    ServeParams,
)
from pytest_llenergy.backends.timeouts import END_WAIT_S
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, FAILED, OUT_OF_TIME, REFUSED

#: A request is late beyond this share of the mean gap between requests, and at least this time (seconds).
LATE_SHARE, LATE_S = 0.1, 0.01


@dataclass
class BatchJob:
    """All prompts at once, one request each. ``bodies`` are encoded requests."""

    endpoint: Endpoint
    bodies: list[bytes]
    params: GenerationParams

    def before_round(self) -> None:
        self.endpoint.check_answers()

    def run(self) -> list[Exchange]:
        return self.endpoint.client.run(self._send())

    async def _send(self) -> list[Exchange]:
        streams = await asyncio.gather(*map(self.endpoint.client.stream, self.bodies))
        tokens = self.params.max_new_tokens
        return [Exchange(stream, tokens, number=number) for number, stream in enumerate(streams)]

    def result(self, outcome: list[Exchange]) -> Generation:
        answered, failures = self.endpoint.read_answers(outcome, self.params, len(outcome))
        if failures:
            raise BackendError(failures[0])
        answers = [answer for _, answer in answered]
        return Generation(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=[answer.request for answer in answers],
            flags=[*self.endpoint.flags, *answer_flags(answers)],
        )


@dataclass
class MissCounter:
    """Counts the requests of a load that have missed the SLO while it runs; ``allowed`` may.

    It never overcounts: a first token does not arrive before the first byte, the end of a stream may come
    some time after its last token, and what the end of the load (``last_ns``) cuts off has missed nothing.
    """

    slo: Slo
    allowed: int
    last_ns: int
    sent: int = 0
    missed: int = 0
    _undecided: list[Stream] = field(default_factory=list)

    def watch(self, stream: Stream) -> None:
        """Add a request that is being sent."""
        self.sent += 1
        self._undecided.append(stream)

    def is_over(self) -> bool:
        """Look whether more requests than may have missed the SLO by now."""
        now_ns = time.monotonic_ns()
        if now_ns >= self.last_ns:
            return self.missed > self.allowed
        streams, self._undecided = self._undecided, []
        for stream in streams:
            if self._has_missed(stream, now_ns):
                self.missed += 1
            elif not stream.ended:
                self._undecided.append(stream)
        return self.missed > self.allowed

    def _has_missed(self, stream: Stream, now_ns: int) -> bool:
        if stream.ended and stream.failed:
            return True
        first_ns = stream.reads[0][0] if stream.reads else now_ns
        if self.slo.ttft_s is not None and first_ns - stream.sent_ns > self.slo.ttft_s * 1e9:
            return True
        if self.slo.e2e_s is None:
            return False
        end_ns = stream.reads[-1][0] if stream.ended and stream.reads else now_ns
        return end_ns - stream.sent_ns > (self.slo.e2e_s + END_WAIT_S) * 1e9


def end_flag(probe: Probe, asked: int, counter: MissCounter) -> Flag:
    """Return why a load ended before all of its requests were sent and answered."""
    sent = f"the load ended with {counter.sent} of {asked} requests sent"
    rest = "its energy and duration are those of what was sent, and its latencies are left out"
    if counter.missed > counter.allowed:
        missed = f"{counter.missed} missed the SLO, and {probe.allowed} of {probe.requests} may"
        return Flag(name=ENDED_EARLY, severity="warning", detail=f"{sent}: {missed}; {rest}")
    return Flag(name=OUT_OF_TIME, severity="warning", detail=f"{sent}, because its time was up; {rest}")


@dataclass(frozen=True)
class LoadOutcome:
    """What was sent, when the load started and ended, and why a load of a search ``ended`` early."""

    exchanges: list[Exchange]
    start_ns: int
    end_ns: int
    ended: Flag | None = None


@dataclass
class LoadJob:
    """Requests in the order of their send times.

    Attributes:
        reopen: Returns a written text with other first words for each run; None to send the same texts in
            each.
    """

    endpoint: Endpoint
    requests: list[Request]
    params: ServeParams
    encoder: Encoder
    reopen: Callable[[str, int], str] | None = None

    def __post_init__(self) -> None:
        # Prompts that are used again are shared.
        self._bodies = {
            id(request): self.encoder.encode(request)
            for request in {id(each): each for each in self.requests}.values()
        }
        # Not from 0: a server that was measured before may still have those texts in its cache.
        self._run = time.time_ns()
        self._failed: list[Exchange] = []
        self._probed = 0
        self._counter: MissCounter | None = None
        #: When the requests of a load of a search end at the latest.
        self._last_ns = 0

    def before_round(self) -> None:
        self.endpoint.check_answers()
        if (probe := self.params.probe) is not None:
            self._last_ns = time.monotonic_ns() + round(probe.longest_s * 1e9)

    def run(self) -> LoadOutcome:
        self._failed = []
        self._run += 1
        requests, probe, number = self.requests, self.params.probe, 0
        if probe is not None:
            assert self.params.slo is not None
            number, self._probed = self._probed - probe.warmups, self._probed + 1
            requests = self.requests if number >= 0 else self.requests[:DEFAULT_REQUESTS]
            # Misses of a warm-up decide nothing.
            allowed = probe.allowed if number >= 0 else len(requests)
            self._counter = MissCounter(self.params.slo, allowed, self._last_ns)
        start_ns = time.monotonic_ns()
        sending = self._send(requests, self.params.offsets_s(max(0, number)), start_ns)
        exchanges = self.endpoint.client.run(sending)
        end_ns = time.monotonic_ns()
        ended = None
        is_cut = len(exchanges) < len(requests) or end_ns > self._last_ns
        if probe is not None and self._counter is not None and is_cut and not self._has_failed():
            ended = end_flag(probe, len(requests), self._counter)
        return LoadOutcome(exchanges, start_ns, end_ns, ended)

    def _has_failed(self) -> bool:
        return len(self._failed) > self.params.max_failures

    def _is_over(self) -> bool:
        """Whether too many requests have failed, or a load of a search needs no more of them."""
        probe, now_ns = self.params.probe, time.monotonic_ns()
        if self._has_failed() or probe is None or self._counter is None:
            return self._has_failed()
        return self._counter.is_over() or now_ns > min(probe.end_ns, self._last_ns)

    async def _send(
        self, requests: Sequence[Request], offsets_s: Sequence[float], start_ns: int
    ) -> list[Exchange]:
        """Send each request at its time, or all of them as slots become free."""
        slots = asyncio.Semaphore(self.params.concurrency) if self.params.concurrency else nullcontext()
        sent: list[asyncio.Task[Exchange | None]] = []
        for number, request in enumerate(requests):
            due_ns = None
            if offsets_s:
                due_ns = start_ns + round(offsets_s[number] * 1e9)
                # Sleep even if it is due, so that requests in flight progress.
                await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
            if self._is_over():
                break
            sent.append(asyncio.create_task(self._exchange(number, request, due_ns, slots)))
        return [exchange for exchange in await asyncio.gather(*sent) if exchange is not None]

    async def _exchange(
        self, number: int, request: Request, due_ns: int | None, slots: asyncio.Semaphore | nullcontext[None]
    ) -> Exchange | None:
        """Send a request when a slot is free; not at all if the load is over by then."""
        ready_ns = time.monotonic_ns()
        async with slots:
            if self._is_over():
                return None
            stream = await self.endpoint.client.stream(
                self._body(request), self.encoder.path, self._timeout_s(), self._watch
            )
            exchange = Exchange(
                stream,
                self.encoder.output_tokens(request),
                None if request.history else request.input_tokens,
                due_ns,
                ready_ns,
                number,
            )
            # What the end of a search's time has cut off is no fault of the server.
            if stream.failed and (self._counter is None or time.monotonic_ns() < self._last_ns):
                self._failed.append(exchange)
        return exchange

    def _timeout_s(self) -> float | None:
        """Return the longest time of a request, which in a search ends with the load."""
        if self._counter is None:
            return self.params.request_timeout_s
        left_s = max((self._last_ns - time.monotonic_ns()) / 1e9, 1e-3)
        return min(left_s, self.params.request_timeout_s or left_s)

    def _watch(self, stream: Stream) -> None:
        if self._counter is not None:
            self._counter.watch(stream)

    def _body(self, request: Request) -> bytes:
        if self.reopen is None or not request.blocks:
            return self._bodies[id(request)]
        opened = self.reopen(request.prompt, self._run)
        return self.encoder.encode(msgspec.structs.replace(request, prompt=opened))

    def result(self, outcome: LoadOutcome) -> ServedLoad:
        in_search = self.params.probe is not None
        answered, failures = self.endpoint.read_answers(
            outcome.exchanges,
            self.params,
            len(self.requests),
            search_rate=self.params.request_rate if in_search else None,
        )
        if outcome.ended is not None:
            return self._part(outcome.ended, *_failed(failures, len(outcome.exchanges)))
        refusal = _refusal(failures, len(answered), self.params.max_failures)
        if refusal is not None:
            if not in_search:
                raise BackendError(refusal)
            # No error, which would end the server: this one goes on, and takes lower rates.
            return self._part(Flag(name=REFUSED, severity="warning", detail=refusal))
        answered.sort(key=lambda each: each[0].stream.sent_ns)
        answers = [answer for _, answer in answered]
        is_capped = self.params.concurrency is not None
        requests = [
            msgspec.structs.replace(answer.request, due_ns=exchange.due_ns if is_capped else None)
            for exchange, answer in answered
        ]
        kept = {id(exchange) for exchange, _ in answered}
        spans, phase_flags = load_phases(
            requests,
            self.params.slots,
            outcome.start_ns,
            outcome.end_ns,
            [exchange.due_ns for exchange, _ in answered],
            failed_ns=[each.due_ns for each in outcome.exchanges if id(each) not in kept],
            is_capped=is_capped,
        )
        return ServedLoad(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=requests,
            exact=all(answer.exact for answer in answers),
            spans=spans,
            failures=failures,
            flags=[
                *self.endpoint.flags,
                *answer_flags(answers, may_hit=self.params.prefix_cache),
                *self._late(max(_seconds(each.due_ns, each.ready_ns) for each in outcome.exchanges)),
                *self._held(outcome.exchanges),
                *_failed(failures, len(outcome.exchanges)),
                *phase_flags,
            ],
        )

    def _part(self, *ended: Flag) -> ServedLoad:
        """Return the result of a load of which only a part was sent or answered."""
        flags = [*self.endpoint.flags, *ended]
        return ServedLoad(texts=[], token_ids=[], requests=[], exact=False, flags=flags)

    def _late(self, late_s: float) -> list[Flag]:
        """Return a flag if the client was too slow for the schedule."""
        offsets_s = self.params.offsets_s()
        gap_s = offsets_s[-1] / (len(offsets_s) - 1) if len(offsets_s) > 1 else 0.0
        if late_s <= max(LATE_S, LATE_SHARE * gap_s):
            return []
        detail = f"a request was sent {late_s * 1e3:.0f} ms late; the host is too busy for this load"
        return [Flag(name="late-request", severity="warning", detail=detail)]

    def _held(self, exchanges: Sequence[Exchange]) -> list[Flag]:
        """Return a flag if the limit on requests in flight held requests back."""
        if self.params.slots is not None or self.params.concurrency is None:
            return []
        held = [_seconds(each.ready_ns, each.stream.sent_ns) for each in exchanges if each.due_ns is not None]
        long = [wait_s for wait_s in held if wait_s > LATE_S]
        if not long:
            return []
        detail = (
            f"concurrency={self.params.concurrency} held back {len(long)} of {len(held)} requests, for up to "
            f"{max(long):.2g} s; latencies, and an SLO, count from sending, and waited_s in the record has "
            "the waits"
        )
        return [Flag(name="late-request", severity="warning", detail=detail)]


def _refusal(failures: Sequence[str], answered: int, max_failures: int) -> str | None:
    """Return why a load of which so many requests failed has no result; None if it has one."""
    if len(failures) > max_failures:
        counted = "1 request" if len(failures) == 1 else f"{len(failures)} requests"
        return f"{failures[0]}; {counted} failed, max_failures is {max_failures}"
    return None if answered else f"{failures[0]}; no request succeeded"


def _failed(failures: Sequence[str], sent: int) -> list[Flag]:
    if not failures:
        return []
    detail = f"{len(failures)} of {sent} requests failed, and their joules count; the first: {failures[0]}"
    return [Flag(name=FAILED, severity="warning", detail=detail)]


def _seconds(start_ns: int | None, end_ns: int) -> float:
    return 0.0 if start_ns is None else (end_ns - start_ns) / 1e9
