# SPDX-License-Identifier: Apache-2.0
"""A server that answers: what it is, whether it lives, and the answers to what was sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.server.answers import (
    Answer,
    FailedRequestError,
    check_lengths,
    read_answer,
    show_line,
)
from pytest_llenergy.backends.server.client import PATHS, Client, Stream
from pytest_llenergy.backends.server.idle import SETTLE_S, IdleCheck
from pytest_llenergy.backends.server.process import is_port_closed
from pytest_llenergy.backends.server.requests import Dialect
from pytest_llenergy.backends.server.settings import Address
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.timeouts import EXIT_WAIT_S
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import Flag

CACHE_UNKNOWN = "the server does not report prefix cache hits; switch its prefix cache off when starting it"


@dataclass
class Exchange:
    """A request and its stream.

    Attributes:
        output_tokens: Tokens that were asked for.
        input_tokens: Tokens that the prompt must have; None if that is not known ahead.
        due_ns: When it was to be sent; None in a closed loop and for follow-ups.
        ready_ns: When the client was able to send it, but for the limit on requests in flight.
        talk: Number of its conversation.
    """

    stream: Stream
    output_tokens: int
    input_tokens: int | None = None
    due_ns: int | None = None
    ready_ns: int = 0
    talk: int = 0

    def name(self, asked: int) -> str:
        """Return its name in messages, out of so many."""
        return f"request {self.talk + 1} of {asked}"


@dataclass
class Endpoint:
    """A server that answers.

    Attributes:
        model: Name of the model in its API.
        offered: The endpoints that it has.
        ready: A path that it answers at once.
        check_alive: Raises with the server's last output line if it has died.
        flags: What a reader must know of every measurement with this server.
        idle: Whether it still works on requests of a load that ended early.
    """

    client: Client
    dialect: Dialect
    model: str
    offered: Sequence[str]
    ready: str
    check_alive: Callable[[], None]
    address: Address
    flags: list[Flag] = field(default_factory=list)
    idle: IdleCheck = field(default_factory=IdleCheck)

    def check_offered(self, endpoint: str) -> None:
        """Raise ``BackendError`` if the server does not have an endpoint."""
        if endpoint not in self.offered:
            other = self.offered[0]
            raise BackendError(
                f"server: it answers at {PATHS[other]} only, and not at {PATHS[endpoint]}; use "
                f"backend.serve(..., endpoint={other!r})"
            )

    def read_field(self, place: tuple[str, str] | None) -> str | None:
        """Return a field of an answer in JSON; None if the server does not have it."""
        if place is None:
            return None
        path, name = place
        found: Any = self.client.get(path).json()
        value = found.get(name) if isinstance(found, dict) else None
        return None if value is None else show_line(str(value))

    def prepare_round(self, connections: int) -> None:
        """Open connections, and wait until the server is idle.

        Raises:
            BackendError: It does not answer, or is still busy with a load that ended early.
        """
        self.open_connections(connections)
        if not self.idle.is_settled and not self.client.run(self.idle.settle(from_now_ns(SETTLE_S))):
            raise BackendError(
                f"server: still busy {SETTLE_S:g} s after a search for the maximum load has closed its "
                "streams; restart it, or use another server for this test"
            )

    def open_connections(self, connections: int) -> None:
        """Open this many connections.

        Raises:
            BackendError: It does not answer, or has died.
        """
        try:
            self.client.open_connections(connections, self.ready)
        except BackendError:
            self.check_alive()
            raise

    def read_answers(
        self,
        exchanges: Sequence[Exchange],
        params: GenerationParams,
        asked: int,
        *,
        search_rate: float | None = None,
    ) -> tuple[list[tuple[Exchange, Answer]], list[str]]:
        """Read the streams, after measured time: a check whether the server has died takes a second.

        Args:
            exchanges: What was sent.
            params: Parameters of the call.
            asked: Number of requests to send, of which failures may have prevented some.
            search_rate: Request rate of a load of a search, where failures are a sign of too high a load;
                None elsewhere.

        Returns:
            The exchanges with an answer, and the messages of the failed ones.

        Raises:
            BackendError: The server has died, or a request of a search fails at any load.
        """
        self._check_broken(exchanges, asked)
        answered: list[tuple[Exchange, Answer]] = []
        failures: list[str] = []
        # A stop token may end any request.
        is_full_length = params.ignore_eos and not params.stop_token_ids
        for exchange in exchanges:
            name = exchange.name(asked)
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
                if search_rate is not None and error.is_rejected:
                    raise BackendError(
                        f"{error}; the server rejects it at any load, not only at {search_rate:.3g} "
                        "request/s, so max_failures does not apply"
                    ) from None
                failures.append(str(error))
            else:
                answered.append((exchange, answer))
        return answered, failures

    def _check_broken(self, exchanges: Sequence[Exchange], asked: int) -> None:
        """Raise ``BackendError`` if streams broke off because the server has died."""
        broken = next((each for each in exchanges if each.stream.broke), None)
        if broken is None:
            return
        self.check_alive()
        # A server that was not started here has no output, but a closed port shows that it is gone.
        if is_port_closed(self.address, EXIT_WAIT_S):
            raise BackendError(
                f"server: {broken.name(asked)}: {broken.stream.broke}; nobody listens at {self.address.url} "
                "anymore"
            )


def answer_flags(answers: Sequence[Answer], *, may_hit: bool = False) -> list[Flag]:
    """Return flags about numbers that contradict each other, and about prefix cache hits if none may be."""
    doubts = [answer.doubt for answer in answers if answer.doubt]
    flags = []
    if doubts:
        detail = (
            f"{len(doubts)} answers have no token times, because the server's counts contradict each other: "
            f"{doubts[0]}"
        )
        flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    if may_hit:
        return flags
    hits = [answer.cached_tokens for answer in answers if answer.cached_tokens]
    if hits:
        detail = (
            f"prefix cache hit: {sum(hits)} prompt tokens of {len(hits)} requests were not computed; "
            "switch the cache off when starting the server, or allow hits (prefix_cache=True)"
        )
        flags.append(Flag(name="prefix-cache", severity="invalid", detail=detail))
    elif any(answer.cached_tokens is None for answer in answers):
        flags.append(Flag(name="prefix-cache", severity="warning", detail=CACHE_UNKNOWN))
    return flags


def sum_cached_tokens(answers: Sequence[Answer]) -> int | None:
    """Return the prompt tokens that were not computed; None if an answer has no count."""
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(known) if len(known) == len(answers) else None


def from_now_ns(seconds: float) -> int:
    """Return the moment so many seconds from now (monotonic nanoseconds)."""
    return time.monotonic_ns() + round(seconds * 1e9)
