# SPDX-License-Identifier: Apache-2.0
"""HTTP client for OpenAI-compatible servers, and what their APIs support beyond the standard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pytest_llenergy.backends.timeouts import CLOSE_GRACE_S, KEEPALIVE_S, REQUEST_TIMEOUT_S
from pytest_llenergy.errors import BackendError

if TYPE_CHECKING:
    import aiohttp


T = TypeVar("T")

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
#: Path of each endpoint.
PATHS = {"completions": COMPLETIONS_PATH, "chat": CHAT_PATH}

JSON_HEADERS = {"Content-Type": "application/json"}

#: Longest error text that is shown.
MAX_ERROR_CHARACTERS = 300

#: Sampling settings that a server would otherwise take from its own or the model's defaults.
PLAIN_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0}
#: Samplers of llama.cpp without min_p and penalties.
LLAMA_CPP_SAMPLERS = ["temperature", "top_k", "top_p"]


class NoAnswerError(Exception):
    """A request without an answer; the text is the reason in one line."""


@dataclass
class Stream:
    """The stream of one request: bytes with their arrival times, parsed later."""

    sent_ns: int = 0
    status: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    broke: str | None = None
    path: str = COMPLETIONS_PATH
    ended: bool = False

    @property
    def failed(self) -> bool:
        """Whether it was refused or broke off, as far as can be seen without parsing it."""
        return self.broke is not None or self.status != 200

    def body(self) -> str:
        """Return the whole body as text."""
        return b"".join(data for _, data in self.reads).decode(errors="replace")


class Client:
    """Client of one server: one event loop and one connection pool, kept as long as the server is used.

    Methods block, except ``stream``, a coroutine for ``run``. ``keeps`` is whether the server keeps a
    connection after streaming on it; see ``detect_keepalive``.
    """

    def __init__(self, url: str) -> None:
        import aiohttp

        self.url = url
        self.keeps: bool = True
        self._connected = 0
        self._loop = asyncio.new_event_loop()
        self._errors = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
        self._session: aiohttp.ClientSession = self.run(self._open_session())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def get(self, path: str, timeout_s: float = REQUEST_TIMEOUT_S) -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            NoAnswerError: If the server does not answer.
        """
        try:
            return self.run(self._get(path, timeout_s))
        except self._errors as error:
            raise NoAnswerError(_error_line(error)) from None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the decoded answer of a request outside of any load; None for anything but success."""
        stream = self.run(self.stream(msgspec.json.encode(body), path, REQUEST_TIMEOUT_S))
        try:
            return None if stream.failed else msgspec.json.decode(stream.body())
        except msgspec.DecodeError:
            return None

    def open_connections(self, connections: int, path: str) -> None:
        """Open this many connections if they are kept.

        Raises:
            BackendError: If the server does not answer.
        """
        # Simultaneous requests need a connection each.
        requests = [self._get(path, REQUEST_TIMEOUT_S) for _ in range(connections if self.keeps else 1)]
        try:
            self.run(self._gather(requests))
        except self._errors as error:
            raise BackendError(
                f"server: GET {path} at {self.url}: no answer ({_error_line(error)})"
            ) from None

    def detect_keepalive(self, body: bytes) -> Stream:
        """Send one request, then find out whether the next one needs a new connection. Returns the first
        stream.

        llama.cpp's server claims to keep connections but closes them after each stream. A request sent before
        the close is noticed would be lost.
        """
        first = self.run(self.stream(body))
        if first.broke is None and first.status == 200:
            self.run(asyncio.sleep(CLOSE_GRACE_S))
            before = self._connected
            second = self.run(self.stream(body))
            self.keeps = second.broke is None and self._connected == before
            # Connections that the server closes while nothing runs would go unnoticed.
            self.run(self._session.close())
            self._session = self.run(self._open_session())
        return first

    async def stream(
        self,
        body: bytes,
        path: str = COMPLETIONS_PATH,
        timeout_s: float | None = None,
        watch: Callable[[Stream], None] = lambda _: None,
    ) -> Stream:
        """Send one request and record when its parts arrive. Failures are recorded, too.

        ``watch`` gets the stream when the request is sent.
        """
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        stream = Stream(sent_ns=time.monotonic_ns(), path=path)
        watch(stream)
        try:
            async with self._session.post(
                self.url + path, data=body, headers=JSON_HEADERS, timeout=limit
            ) as response:
                stream.status = response.status
                async for data in response.content.iter_any():
                    stream.reads.append((time.monotonic_ns(), data))
        except asyncio.TimeoutError:
            stream.broke = "a time-out" if timeout_s is None else f"not done after {timeout_s:g} s"
        except self._errors as error:
            stream.broke = _error_line(error)
        stream.ended = True
        return stream

    def close(self) -> None:
        """Close the connections and the loop."""
        self.run(self._session.close())
        self._loop.close()

    async def _count_connection(self, *_: object) -> None:
        self._connected += 1

    async def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._count_connection)
        # No limits: a load can have any number of requests in flight, and take any time.
        policy: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S} if self.keeps else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, **policy)
        return aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trace_configs=[trace]
        )

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(self.url + path, timeout=limit) as response:
            return response.status, await response.read()

    async def _gather(self, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return list(await asyncio.gather(*requests))


def _error_line(error: BaseException) -> str:
    """Return an error in one line; some have no text, or that of a lower layer with a status of no answer."""
    text = str(error).partition(": <TransferEncodingError")[0] or type(error).__name__
    return text.splitlines()[0][:MAX_ERROR_CHARACTERS]


def _tokens_from_usage(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    return usage.get("completion_tokens") if usage else None


def _tokens_from_timings(event: Mapping[str, Any]) -> int | None:
    timings = event.get("timings")
    return timings.get("predicted_n") if timings else None


def _count_with_llama_cpp(client: Client, _model: str, text: str, is_chat: bool) -> int | None:
    """Count as ``tools/server/README.md`` describes: POST /apply-template and POST /tokenize."""
    if is_chat:
        templated = client.post("/apply-template", {"messages": [{"role": "user", "content": text}]})
        if templated is None:
            return None
        text = templated["prompt"]
    answer = client.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
    return None if answer is None else len(answer["tokens"])


def _count_with_vllm(client: Client, model: str, text: str, is_chat: bool) -> int | None:
    """Count as ``vllm/entrypoints/serve/tokenize`` does: POST /tokenize."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    answer = client.post("/tokenize", {"model": model, **asked})
    return None if answer is None else int(answer["count"])


@dataclass(frozen=True)
class Dialect:
    """How to talk to one kind of server. A field that a server does not know may be refused.

    Attributes:
        always: Fields of every request.
        cache: Fields that allow or forbid keeping prefixes.
        so_far: Reads from a chunk the number of tokens so far, if the server reports it.
        stops: Whether ``stop_token_ids`` is supported.
        takes_top_k: Whether ``top_k`` is supported.
        version: Path and field of the server's version.
        count_tokens: Asks the server for the tokens of a text, given the model's name and whether the text is
            a chat message; None if it does not answer.
        weights: Path and field of the types of the model's weights.
    """

    name: str
    always: Mapping[str, Any] = field(default_factory=dict)
    cache: Callable[[bool], Mapping[str, Any]] = lambda _: {}
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    so_far: Callable[[Mapping[str, Any]], int | None] = lambda _: None
    stops: bool = False
    takes_top_k: bool = False
    version: tuple[str, str] | None = None
    count_tokens: Callable[[Client, str, str, bool], int | None] = lambda *_: None
    weights: tuple[str, str] | None = None

    @property
    def switches_cache(self) -> bool:
        """Whether a request can forbid keeping prefixes."""
        return bool(self.cache(False))


#: Dialects by ``owned_by`` of ``/v1/models``.
DIALECTS = {
    # tools/server/README.md of llama.cpp: POST /completion, whose options its OpenAI endpoints take as well.
    "llamacpp": Dialect(
        "llama.cpp",
        always={"timings_per_token": True, "samplers": LLAMA_CPP_SAMPLERS},
        cache=lambda kept: {"cache_prompt": kept},
        so_far=_tokens_from_timings,
        takes_top_k=True,
        version=("/props", "build_info"),
        count_tokens=_count_with_llama_cpp,
        weights=("/props", "model_ftype"),
    ),
    # vllm/entrypoints: openai/completion/protocol.py (CompletionRequest), generate/base/protocol.py
    # (StreamOptions).
    "vllm": Dialect(
        "vLLM",
        always={"return_token_ids": True, **PLAIN_SAMPLING},
        stream_options={"continuous_usage_stats": True},
        so_far=_tokens_from_usage,
        stops=True,
        takes_top_k=True,
        version=("/version", "version"),
        count_tokens=_count_with_vllm,
    ),
    # python/sglang/srt/entrypoints/openai/protocol.py.
    "sglang": Dialect("SGLang", always=PLAIN_SAMPLING, stops=True, takes_top_k=True),
}

UNKNOWN_DIALECT = Dialect("unknown")


def select_dialect(models: Mapping[str, Any]) -> Dialect:
    """Select the dialect from the answer of ``GET /v1/models``."""
    owners = [str(each.get("owned_by", "")) for each in models.get("data") or ()]
    return DIALECTS.get(owners[0].lower(), UNKNOWN_DIALECT) if owners else UNKNOWN_DIALECT
