# SPDX-License-Identifier: Apache-2.0
"""A server that answers: found to be ready, asked what it serves, and the answers to what was sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.secrets import hide_keys
from pytest_llenergy.backends.server.answers import (
    Answer,
    FailedRequestError,
    check_lengths,
    error_text,
    explain_status,
    read_answer,
    show_line,
)
from pytest_llenergy.backends.server.client import PATHS, Client, Stream
from pytest_llenergy.backends.server.dialects import Dialect, Encoder
from pytest_llenergy.backends.server.process import is_port_closed
from pytest_llenergy.backends.server.settings import Address, ServerSettings
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.backends.timeouts import (
    HEALTH_POLL_S,
    HEALTH_TIMEOUT_S,
    PROBE_TIMEOUT_S,
)
from pytest_llenergy.backends.traffic.requests import Request
from pytest_llenergy.errors import BackendError, ModelError, ServerError
from pytest_llenergy.record.record import Flag

MODELS_PATH = "/v1/models"

#: Paths that show whether a server is ready; the next one is tried if a server does not have one.
READY_PATHS = ("/health", MODELS_PATH)

#: Statuses of a path or method that a server does not have, of a key that it refuses, and of too much to do.
ABSENT, FORBIDDEN, BUSY = (400, 404, 405, 422, 501), (401, 403), (408, 429, 503)

CACHE_UNKNOWN = "the server does not report prefix cache hits; switch its prefix cache off when starting it"

#: From this many tokens on, a stream takes longer than one reading of the connection.
STREAMED_TOKENS = 8

#: Raises ``ServerError`` with the server's last output line if it has died.
CheckAlive = Callable[..., None]


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

    def name(self, asked: int) -> str:
        """Return its name in messages, out of so many."""
        return f"request {self.number + 1} of {asked}"


@dataclass
class Endpoint:
    """A server that answers.

    Attributes:
        refusal: What it answered at an endpoint that it has and that does not work, in parentheses.
        ready: A path that it answers at once.
        flags: What a reader must know of every measurement with this server.
    """

    client: Client
    dialect: Dialect
    model: str
    offered: Sequence[str]
    refusal: str
    ready: str
    check_alive: CheckAlive
    address: Address
    flags: list[Flag] = field(default_factory=list)

    def check_offered(self, endpoint: str) -> None:
        """Raise ``BackendError`` if the server does not have an endpoint."""
        if endpoint not in self.offered:
            other = self.offered[0]
            raise BackendError(
                f"server: it answers at {PATHS[other]} only, and not at {PATHS[endpoint]}{self.refusal}; use "
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

    def check_answers(self) -> None:
        """Raise ``BackendError`` if the server does not answer, or has died."""
        answer = self.client.get(self.ready)
        if answer.status == 0:
            self.check_alive()
            raise BackendError(f"server: GET {self.ready} at {self.client.url}: no answer ({answer.broke})")

    def read_answers(
        self,
        exchanges: Sequence[Exchange],
        params: GenerationParams,
        asked: int,
        *,
        search_rate: float | None = None,
    ) -> tuple[list[tuple[Exchange, Answer]], list[str]]:
        """Return the exchanges with an answer, and the messages of the failed ones, out of ``asked``.

        After measured time: a check whether the server has died takes a second. ``search_rate`` is the rate
        of a load of a search, where failures are a sign of too high a load, unless they happen at any.
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
        if is_port_closed(self.address):
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
    several = [each.request for each in answers if each.request.output_tokens >= STREAMED_TOKENS]
    if several and 2 * sum(each.first_token_ns == each.last_token_ns for each in several) > len(several):
        detail = (
            "answers came whole, since the server or a proxy does not stream: times of tokens are those of "
            "answers"
        )
        flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    if may_hit:
        return flags
    cached = [answer.request.cached_tokens for answer in answers]
    hits = [tokens for tokens in cached if tokens]
    if hits:
        detail = (
            f"prefix cache hit: {sum(hits)} prompt tokens of {len(hits)} requests were not computed; "
            "switch the cache off when starting the server, or allow hits (prefix_cache=True)"
        )
        flags.append(Flag(name="prefix-cache", severity="invalid", detail=detail))
    elif None in cached:
        flags.append(Flag(name="prefix-cache", severity="warning", detail=CACHE_UNKNOWN))
    return flags


def await_ready(client: Client, settings: ServerSettings, check_alive: CheckAlive, named: str) -> str:
    """Wait until the server is ready; one that was already running must be so at once.

    ``named`` is the model, for messages. Returns the path that says so.
    """
    deadline = time.monotonic() + (settings.timeout_s if settings.words else 0.0)
    while True:
        for path in READY_PATHS:
            answer = client.get(path, HEALTH_TIMEOUT_S)
            if answer.status not in ABSENT:
                break
        # A server with neither path is asked for a completion next.
        if 200 <= answer.status < 300 or answer.status in ABSENT:
            return path
        _check_allowed(answer)
        check_alive(f"{named} before GET {path} gave 200")
        if time.monotonic() > deadline:
            break
        time.sleep(HEALTH_POLL_S)
    last = _describe(answer)
    if not settings.words:
        raise BackendError(f"server: GET {path} at {client.url}: {last}; is it running, and ready?")
    raise ServerError(
        f"server: not ready after {settings.timeout_s:g} s, GET {path}: {last}; see --energy-timeout"
    )


def _describe(answer: Stream) -> str:
    return f"{answer.status}: {error_text(answer.body())}" if answer.status else f"no answer ({answer.broke})"


def _check_allowed(answer: Stream) -> None:
    """Raise ``BackendError`` if the key is refused, or the server is elsewhere."""
    if answer.status in FORBIDDEN or 300 <= answer.status < 400:
        raise BackendError(f"server: {explain_status(answer)}")


def list_models(client: Client) -> list[Mapping[str, Any]]:
    """Return what ``/v1/models`` lists; nothing if the server lacks it."""
    answer = client.get(MODELS_PATH)
    _check_allowed(answer)
    if answer.status == 0 or answer.status >= 500:
        raise BackendError(f"server: GET {MODELS_PATH} at {client.url}: {_describe(answer)}")
    if answer.status == 200 and answer.media == "text/html":
        raise BackendError(
            f"server: {MODELS_PATH} at {client.url} answered with an HTML page; is this a server with the "
            "OpenAI API?"
        )
    found = answer.json()
    listed = found.get("data") if isinstance(found, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def probe_endpoints(
    client: Client, dialect: Dialect, model: str, served: Sequence[str], check_alive: CheckAlive
) -> tuple[tuple[str, ...], str]:
    """Request a token of each endpoint, so that what cannot work fails before any measurement.

    Returns the endpoints that answer: completions without the chat endpoint being asked, or chat alone; and
    what completions answered then.
    """
    first: FailedRequestError | None = None
    for endpoint in PATHS:
        encoder = Encoder(model, dialect, GenerationParams(max_new_tokens=1), endpoint=endpoint)
        body = encoder.encode(Request(prompt="a"))
        stream = client.run(client.stream(body, encoder.path, PROBE_TIMEOUT_S))
        if stream.broke:
            check_alive()
        try:
            read_answer(stream, f"model {model_label(model)!r}")
        except FailedRequestError as error:
            first = first or error
            # What is wrong with completions may not be with chat, but for the key, the address and the load.
            if error.status in (*FORBIDDEN, *BUSY) or not 400 <= error.status < 600:
                break
        else:
            if first is None:
                return tuple(PATHS), ""
            return (endpoint,), "" if first.status in (404, 405, 501) else f" ({first})"
    assert first is not None
    if first.status == 404:
        raise ModelError(
            f"{first}; it serves: {', '.join(map(model_label, served)) or 'nothing that it lists'}"
        ) from None
    raise first


def model_label(name: str) -> str:
    """Return a model's name in the API; of a path only the last part."""
    return hide_keys(Path(name).name if Path(name).is_absolute() else name)
