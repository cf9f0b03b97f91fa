# SPDX-License-Identifier: Apache-2.0
"""Jobs of the server backend: send batches and loads, which in a search end once their result is certain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pytest_llenergy.backends.load_phases import load_phases
from pytest_llenergy.backends.server.answers import (
    Answer,
    FailedRequestError,
    answer_flags,
    check_lengths,
    read_answer,
)
from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.server.dialects import Encoder
from pytest_llenergy.backends.tasks import (
    DEFAULT_REQUESTS,
    Generation,
    GenerationParams,
    ServedLoad,
    ServeParams,
)
from pytest_llenergy.backends.timeouts import END_WAIT_S
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, FAILED, REFUSED

if TYPE_CHECKING:
    from pytest_llenergy.backends.server.backend import ServerBackend

#: A request is late beyond this share of the mean gap between requests, and at least this time (seconds).
LATE_SHARE, LATE_S = 0.1, 0.01


@dataclass
class Exchange:
    """A request and its stream, with the tokens that were asked for.

    Attributes:
        input_tokens: Tokens that the prompt must have; None if that is not known ahead.
        due_ns: When it was to be sent; None in a closed loop.
        ready_ns: When the client was able to send it, but for the limit on requests in flight.
        number: Its place in the load, from 0.
    """

    stream: Stream
    output_tokens: int
    input_tokens: int | None = None
    due_ns: int | None = None
    ready_ns: int = 0
    number: int = 0


def read_answers(
    server: ServerBackend,
    exchanges: Sequence[Exchange],
    params: GenerationParams,
    asked: int,
    *,
    in_search: bool = False,
) -> tuple[list[tuple[Exchange, Answer]], list[str]]:
    """Return the exchanges with an answer, and the messages of the failed ones, out of ``asked``.

    After measured time: a check whether the server has died takes a second. ``in_search``: failures are a
    sign of too high a load, unless they happen at any.
    """
    if any(each.stream.broke for each in exchanges):
        server.check_alive()
    answered: list[tuple[Exchange, Answer]] = []
    failures: list[str] = []
    # A stop token may end any request.
    is_full_length = params.ignore_eos and not params.stop_token_ids
    for exchange in exchanges:
        name = f"request {exchange.number + 1} of {asked}"
        try:
            answer = read_answer(exchange.stream, name)
            check_lengths(
                answer,
                name,
                asked=exchange.output_tokens,
                input_tokens=exchange.input_tokens,
                is_full_length=is_full_length,
            )
        except FailedRequestError as error:
            if in_search and error.is_rejected:
                raise BackendError(
                    f"{error}; the server rejects it at any load, so max_failures does not apply"
                ) from None
            failures.append(str(error))
        else:
            answered.append((exchange, answer))
    return answered, failures


@dataclass
class BatchJob:
    """All prompts at once, one request each. ``bodies`` are encoded requests."""

    server: ServerBackend
    bodies: list[bytes]
    params: GenerationParams

    def before_round(self) -> None:
        self.server.check_answers()

    def run(self) -> list[Exchange]:
        return self.server.client.run(self._send())

    async def _send(self) -> list[Exchange]:
        streams = await asyncio.gather(*map(self.server.client.stream, self.bodies))
        tokens = self.params.max_new_tokens
        return [Exchange(stream, tokens, number=number) for number, stream in enumerate(streams)]

    def result(self, outcome: list[Exchange]) -> Generation:
        answered, failures = read_answers(self.server, outcome, self.params, len(outcome))
        if failures:
            raise BackendError(failures[0])
        answers = [answer for _, answer in answered]
        return Generation(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=[answer.request for answer in answers],
            flags=[*self.server.flags, *answer_flags(answers)],
        )


@dataclass(frozen=True)
class LoadOutcome:
    """What was sent, when the load started and ended, and whether its SLO could not be met any more."""

    exchanges: list[Exchange]
    start_ns: int
    end_ns: int
    is_cut: bool = False


@dataclass
class LoadJob:
    """Requests in the order of their send times.

    Attributes:
        reopen: Returns a written text with other first words for each run; None to send the same texts in
            each.
    """

    server: ServerBackend
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
        self._probed = self._failed = self._missed = 0

    def before_round(self) -> None:
        self.server.check_answers()

    def run(self) -> LoadOutcome:
        self._failed = self._missed = 0
        self._run += 1
        requests, number = self.requests, 0
        if self.params.probe is not None:
            number, self._probed = self._probed - self.params.probe.warmups, self._probed + 1
            requests = self.requests if number >= 0 else self.requests[:DEFAULT_REQUESTS]
        start_ns = time.monotonic_ns()
        sending = self._send(requests, self.params.offsets_s(max(0, number)), start_ns)
        exchanges = self.server.client.run(sending)
        return LoadOutcome(exchanges, start_ns, time.monotonic_ns(), len(exchanges) < len(requests))

    def _is_over(self) -> bool:
        """Whether too many requests have failed, or the SLO of a load of a search cannot be met any more."""
        probe = self.params.probe
        is_missed = probe is not None and self._missed > probe.allowed
        return is_missed or self._failed > self.params.max_failures

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
            stream = await self.server.client.stream(
                self._body(request), self.encoder.path, self.params.request_timeout_s
            )
            self._failed += stream.failed
            self._missed += stream.failed or self._is_late(stream)
            return Exchange(
                stream,
                self.encoder.output_tokens(request),
                None if request.history else request.input_tokens,
                due_ns,
                ready_ns,
                number,
            )

    def _is_late(self, stream: Stream) -> bool:
        """Whether an answer exceeds the SLO, as far as can be seen without parsing it.

        Never counts too many: the first token comes with the first byte or later, and the last may come some
        time before the end.
        """
        slo = self.params.slo
        if slo is None or not stream.reads:
            return False
        first_s, last_s = ((each[0] - stream.sent_ns) / 1e9 for each in (stream.reads[0], stream.reads[-1]))
        is_late = slo.ttft_s is not None and first_s > slo.ttft_s
        return is_late or (slo.e2e_s is not None and last_s > slo.e2e_s + END_WAIT_S)

    def _body(self, request: Request) -> bytes:
        if self.reopen is None or not request.blocks:
            return self._bodies[id(request)]
        opened = self.reopen(request.prompt, self._run)
        return self.encoder.encode(msgspec.structs.replace(request, prompt=opened))

    def result(self, outcome: LoadOutcome) -> ServedLoad:
        answered, failures = read_answers(
            self.server,
            outcome.exchanges,
            self.params,
            len(self.requests),
            in_search=self.params.probe is not None,
        )
        refusal = _refusal(failures, len(answered), self.params.max_failures)
        if refusal is not None:
            if self.params.probe is None:
                raise BackendError(refusal)
            # No error, which would end the server: this one goes on, and takes lower rates.
            return self._part(Flag(name=REFUSED, severity="warning", detail=refusal))
        if outcome.is_cut:
            sent = len(outcome.exchanges)
            detail = (
                f"the load ended with {sent} of {len(self.requests)} requests sent, because too many had "
                "missed the SLO; its energy and duration are those of what was sent, and its latencies are "
                "left out"
            )
            ended = Flag(name=ENDED_EARLY, severity="warning", detail=detail)
            return self._part(ended, *_failed(failures, sent))
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
                *self.server.flags,
                *answer_flags(answers, may_hit=self.params.prefix_cache),
                *self._late(max(_seconds(each.due_ns, each.ready_ns) for each in outcome.exchanges)),
                *self._held(outcome.exchanges),
                *_failed(failures, len(outcome.exchanges)),
                *phase_flags,
            ],
        )

    def _part(self, *ended: Flag) -> ServedLoad:
        """Return the result of a load of which only a part was sent or answered."""
        flags = [*self.server.flags, *ended]
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
