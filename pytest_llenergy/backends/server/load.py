# SPDX-License-Identifier: Apache-2.0
"""Jobs of the server backend: send batches and loads of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.server.client import Client, Dialect, Stream
from pytest_llenergy.backends.server.process import is_port_closed
from pytest_llenergy.backends.server.settings import Address
from pytest_llenergy.backends.server.stream import Answer, read_answer
from pytest_llenergy.backends.tasks import (
    GenerationParams,
    ServedGeneration,
    ServedLoad,
    ServeParams,
    phase_spans,
)
from pytest_llenergy.backends.timeouts import EXIT_WAIT_S
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Flag

#: A request is late beyond this share of the mean gap between requests, and at least this time (seconds).
LATE_SHARE, LATE_S = 0.1, 0.01

CACHE_UNKNOWN = "the server does not report prefix cache hits; switch its prefix cache off when starting it"


@dataclass
class Endpoint:
    """A server that answers.

    Attributes:
        check: Raises with the server's last output line if it has died.
        flags: What a reader must know of every measurement with this server.
    """

    client: Client
    dialect: Dialect
    health: str
    check: Callable[[], None]
    address: Address
    flags: list[Flag] = field(default_factory=list)

    def run(self, work: Coroutine[Any, Any, list[Stream]]) -> list[Stream]:
        """Run the requests. If some broke off, report a server that died meanwhile."""
        streams = self.client.run(work)
        broken = [stream for stream in streams if stream.broke]
        if broken:
            self.check()
            # A server that was not started here has no output, but a closed port shows that it is gone.
            if is_port_closed(self.address, EXIT_WAIT_S):
                for stream in broken:
                    stream.broke = f"{stream.broke}; nobody listens at {self.address.url} anymore"
        return streams

    def parse_answers(self, streams: Sequence[Stream], params: GenerationParams) -> list[Answer]:
        """Parse the streams.

        Raises:
            BackendError: If an answer has the wrong length.
        """
        answers = []
        for number, stream in enumerate(streams, 1):
            name = f"request {number} of {len(streams)}"
            answer = read_answer(stream, self.dialect, name)
            produced = answer.request.output_tokens
            # A stop token may end any request.
            fixed = params.ignore_eos and not params.stop_token_ids
            short = fixed and produced < params.max_new_tokens
            if short or produced > params.max_new_tokens:
                raise BackendError(
                    f"server: {name}: {produced} tokens instead of {params.max_new_tokens}; "
                    + ("the server ignores ignore_eos" if short else "the server ignores max_tokens")
                )
            answers.append(answer)
        return answers

    def cache_flags(self, answers: Sequence[Answer]) -> list[Flag]:
        """Return flags about prefix cache hits, which distort the measured work."""
        hits = [answer.cached_tokens for answer in answers if answer.cached_tokens]
        if hits:
            detail = (
                f"prefix cache hit: {sum(hits)} prompt tokens of {len(hits)} requests were not computed; "
                "switch the cache off when starting the server"
            )
            return [Flag(name="prefix-cache", severity="invalid", detail=detail)]
        if any(answer.cached_tokens is None for answer in answers):
            return [Flag(name="prefix-cache-unknown", severity="warning", detail=CACHE_UNKNOWN)]
        return []


@dataclass
class BatchJob:
    """All prompts at once, one request each. ``bodies`` are encoded requests."""

    endpoint: Endpoint
    bodies: list[bytes]
    params: GenerationParams

    def before_round(self) -> None:
        """Open a connection per request."""
        self.endpoint.client.open_connections(len(self.bodies), self.endpoint.health)

    def run(self) -> list[Stream]:
        return self.endpoint.run(_send_all(self.endpoint.client, self.bodies))

    def result(self, outcome: list[Stream]) -> ServedGeneration:
        answers = self.endpoint.parse_answers(outcome, self.params)
        return ServedGeneration(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=[answer.request for answer in answers],
            cached_tokens=_sum_cached_tokens(answers),
            flags=[*self.endpoint.flags, *self.endpoint.cache_flags(answers)],
        )


@dataclass(frozen=True)
class LoadOutcome:
    """Streams of a load. ``late_s`` is the largest delay of a request behind its send time."""

    streams: list[Stream]
    start_ns: int
    end_ns: int
    late_s: float


@dataclass
class LoadJob:
    """Requests in the order of their send times."""

    endpoint: Endpoint
    bodies: list[bytes]
    params: ServeParams

    def before_round(self) -> None:
        """Open the connections that are needed at once; an open loop opens more as it goes."""
        connections = min(self.params.concurrency or 1, len(self.bodies))
        self.endpoint.client.open_connections(connections, self.endpoint.health)

    def run(self) -> LoadOutcome:
        client, start_ns = self.endpoint.client, time.monotonic_ns()
        offsets_s = self.params.offsets_s()
        if self.params.concurrency is not None:
            streams = self.endpoint.run(_send_closed_loop(client, self.bodies, self.params.concurrency))
        else:
            streams = self.endpoint.run(_send_open_loop(client, self.bodies, offsets_s, start_ns))
        late = [
            (stream.sent_ns - start_ns) / 1e9 - offset_s
            for stream, offset_s in zip(streams, offsets_s, strict=False)
        ]
        return LoadOutcome(streams, start_ns, time.monotonic_ns(), max(late, default=0.0))

    def result(self, outcome: LoadOutcome) -> ServedLoad:
        answers = self.endpoint.parse_answers(outcome.streams, self.params)
        requests = [answer.request for answer in answers]
        flags = [] if self.params.prefix_cache else self.endpoint.cache_flags(answers)
        spans = phase_spans(requests, self.params.concurrency, outcome.start_ns, outcome.end_ns)
        return ServedLoad(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=requests,
            cached_tokens=_sum_cached_tokens(answers),
            exact=all(answer.exact for answer in answers),
            spans=spans,
            flags=[*self.endpoint.flags, *flags, *self._late(outcome.late_s)],
        )

    def _late(self, late_s: float) -> list[Flag]:
        offsets_s = self.params.offsets_s()
        gap_s = offsets_s[-1] / (len(offsets_s) - 1) if len(offsets_s) > 1 else 0.0
        if not offsets_s or late_s <= max(LATE_S, LATE_SHARE * gap_s):
            return []
        detail = f"a request was sent {late_s * 1e3:.0f} ms late; the host is too busy for this load"
        return [Flag(name="late-request", severity="warning", detail=detail)]


def _sum_cached_tokens(answers: Sequence[Answer]) -> int | None:
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(known) if len(known) == len(answers) else None


async def _send_all(client: Client, bodies: Sequence[bytes]) -> list[Stream]:
    return list(await asyncio.gather(*(client.stream(body) for body in bodies)))


async def _send_open_loop(
    client: Client, bodies: Sequence[bytes], offsets_s: Sequence[float], start_ns: int
) -> list[Stream]:
    """Send each request at its time."""
    sent: list[asyncio.Task[Stream]] = []
    for body, offset_s in zip(bodies, offsets_s, strict=True):
        left_s = offset_s - (time.monotonic_ns() - start_ns) / 1e9
        # Sleep even if it is due, so that requests in flight progress.
        await asyncio.sleep(max(0.0, left_s))
        sent.append(asyncio.create_task(client.stream(body)))
    return list(await asyncio.gather(*sent))


async def _send_closed_loop(client: Client, bodies: Sequence[bytes], concurrency: int) -> list[Stream]:
    """Keep ``concurrency`` requests in flight; stop after one that broke off."""
    streams: dict[int, Stream] = {}
    waiting = iter(enumerate(bodies))

    async def send_in_turn() -> None:
        for number, body in waiting:
            streams[number] = await client.stream(body)
            if streams[number].broke:
                return

    await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))
    return [streams[number] for number in sorted(streams)]
