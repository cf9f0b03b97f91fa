# SPDX-License-Identifier: Apache-2.0
"""Send batches and loads of requests to a server."""

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
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import Flag

#: Share of the mean gap between two requests by which one may be late, and at least (seconds).
LATE_SHARE, LATE_S = 0.1, 0.01

#: A server that dies closes its connections first; how long it may take to be gone (seconds).
EXIT_WAIT_S = 1.0

CACHE_UNKNOWN = (
    "the server does not say whether prompts came from its prefix cache; switch that off where it is started"
)


@dataclass
class Endpoint:
    """A server that answers, at ``address``. ``check`` raises with its last words if it has died.

    ``flags`` are what a reader must know of all that is measured with it.
    """

    client: Client
    dialect: Dialect
    health: str
    check: Callable[[], None]
    address: Address
    flags: list[Flag] = field(default_factory=list)

    def run(self, work: Coroutine[Any, Any, list[Stream]]) -> list[Stream]:
        """Do it; whoever has died meanwhile is named."""
        streams = self.client.run(work)
        broken = [stream for stream in streams if stream.broke]
        if broken:
            self.check()
            # One that was not started here has no last words; that it is gone can be seen.
            if is_port_closed(self.address, EXIT_WAIT_S):
                for stream in broken:
                    stream.broke = f"{stream.broke}; nobody listens at {self.address.url} any more"
        return streams

    def answers(self, streams: Sequence[Stream], params: GenerationParams) -> list[Answer]:
        """Read what came. Raises ``BackendError`` for one that is not what was asked for."""
        answers = []
        for number, stream in enumerate(streams, 1):
            name = f"request {number} of {len(streams)}"
            answer = read_answer(stream, self.dialect, name)
            produced = answer.request.output_tokens
            short = params.ignore_eos and produced < params.max_new_tokens
            if short or produced > params.max_new_tokens:
                raise BackendError(
                    f"server: {name}: {produced} tokens where {params.max_new_tokens} were asked for; "
                    + ("it does not heed ignore_eos" if short else "it does not heed max_tokens")
                )
            answers.append(answer)
        return answers

    def cache_flags(self, answers: Sequence[Answer]) -> list[Flag]:
        """What is known of its prefix cache, which nobody wanted."""
        hits = [answer.cached_tokens for answer in answers if answer.cached_tokens]
        if hits:
            detail = (
                f"prefix cache hit: {sum(hits)} prompt tokens of {len(hits)} requests were not computed; "
                "switch the cache off where the server is started"
            )
            return [Flag(name="prefix-cache", severity="invalid", detail=detail)]
        if any(answer.cached_tokens is None for answer in answers):
            return [Flag(name="prefix-cache-unknown", severity="warning", detail=CACHE_UNKNOWN)]
        return []


@dataclass
class BatchJob:
    """All prompts at once, each a request. ``bodies`` are ready to be sent."""

    endpoint: Endpoint
    bodies: list[bytes]
    params: GenerationParams

    def ready(self) -> None:
        """Have a connection for each."""
        self.endpoint.client.open(len(self.bodies), self.endpoint.health)

    def run(self) -> list[Stream]:
        return self.endpoint.run(_send_all(self.endpoint.client, self.bodies))

    def result(self, outcome: list[Stream]) -> ServedGeneration:
        answers = self.endpoint.answers(outcome, self.params)
        return ServedGeneration(
            texts=[answer.text for answer in answers],
            token_ids=[answer.token_ids for answer in answers],
            requests=[answer.request for answer in answers],
            cached_tokens=_sum_cached_tokens(answers),
            flags=[*self.endpoint.flags, *self.endpoint.cache_flags(answers)],
        )


@dataclass(frozen=True)
class LoadOutcome:
    """What came of a load. ``late_s`` is the most by which a request was sent after its time."""

    streams: list[Stream]
    start_ns: int
    end_ns: int
    late_s: float


@dataclass
class LoadJob:
    """Requests in the order in which they are to be sent."""

    endpoint: Endpoint
    bodies: list[bytes]
    params: ServeParams

    def ready(self) -> None:
        """Have the connections that are needed at once for certain; an open loop opens others as it goes."""
        wanted = min(self.params.concurrency or 1, len(self.bodies))
        self.endpoint.client.open(wanted, self.endpoint.health)

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
        answers = self.endpoint.answers(outcome.streams, self.params)
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
        detail = (
            f"a request was sent {late_s * 1e3:.0f} ms after its time; the host is too busy for this load"
        )
        return [Flag(name="late-request", severity="warning", detail=detail)]


def _sum_cached_tokens(answers: Sequence[Answer]) -> int | None:
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(known) if len(known) == len(answers) else None


async def _send_all(client: Client, bodies: Sequence[bytes]) -> list[Stream]:
    return list(await asyncio.gather(*(client.stream(body) for body in bodies)))


async def _send_open_loop(
    client: Client, bodies: Sequence[bytes], offsets_s: Sequence[float], start_ns: int
) -> list[Stream]:
    """Send each when its time has come."""
    sent: list[asyncio.Task[Stream]] = []
    for body, offset_s in zip(bodies, offsets_s, strict=True):
        left_s = offset_s - (time.monotonic_ns() - start_ns) / 1e9
        # Also where it is due: those on their way are looked at in between.
        await asyncio.sleep(max(0.0, left_s))
        sent.append(asyncio.create_task(client.stream(body)))
    return list(await asyncio.gather(*sent))


async def _send_closed_loop(client: Client, bodies: Sequence[bytes], concurrency: int) -> list[Stream]:
    """Send the next when one is done. What has broken off is not followed by others."""
    streams: dict[int, Stream] = {}
    waiting = iter(enumerate(bodies))

    async def one_after_the_other() -> None:
        for number, body in waiting:
            streams[number] = await client.stream(body)
            if streams[number].broke:
                return

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return [streams[number] for number in sorted(streams)]
