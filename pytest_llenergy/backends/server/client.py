# SPDX-License-Identifier: Apache-2.0
"""HTTP client of OpenAI-compatible servers and their dialects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_llenergy.errors import BackendError

if TYPE_CHECKING:
    import aiohttp


# The HTTP client: one event loop and one pool of connections, kept as long as the server is used.

T = TypeVar("T")

COMPLETIONS_PATH = "/v1/completions"

JSON_HEADERS = {"Content-Type": "application/json"}

#: Longest answer of an error that is shown (characters).
MAX_ERROR_CHARACTERS = 300

#: How long a connection is kept that nobody uses (seconds). Servers close theirs after five (llama.cpp's, and
#: uvicorn by default, which vLLM and SGLang use), and a request that is sent meanwhile is lost.
KEEPALIVE_S = 3.0

#: How long after a stream a server may take to close its connection (seconds).
CLOSE_GRACE_S = 0.3

#: How long an answer that is no stream may take (seconds).
REQUEST_TIMEOUT_S = 30.0


class NoAnswerError(Exception):
    """A request that came to nothing; its text says why, in a line."""


@dataclass
class Stream:
    """What came of one request: bytes as they came, each with its time; they are read later."""

    sent_ns: int = 0
    status: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    broke: str | None = None

    def body(self) -> str:
        """All of it."""
        return b"".join(data for _, data in self.reads).decode(errors="replace")


class Client:
    """Asks one server. Its methods block, but for ``stream``, which is for coroutines that ``run`` runs.

    ``keeps`` is whether the server keeps a connection on which it has streamed; see ``learn``.
    """

    def __init__(self, url: str) -> None:
        import aiohttp

        self.url = url
        self._completions = url + COMPLETIONS_PATH
        self.keeps: bool = True
        self._connected = 0
        self._loop = asyncio.new_event_loop()
        self._errors = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
        self._session: aiohttp.ClientSession = self.run(self._opened())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end."""
        return self._loop.run_until_complete(work)

    def get(self, path: str, timeout_s: float = REQUEST_TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body. Raises ``NoAnswerError``."""
        try:
            return self.run(self._get(path, timeout_s))
        except self._errors as error:
            raise NoAnswerError(_error_line(error)) from None

    def open(self, connections: int, path: str) -> None:
        """Have so many connections open, where they are kept.

        Raises ``BackendError`` when the server does not answer.
        """
        # Asked for at once, each needs a connection of its own.
        asked = [self._get(path, REQUEST_TIMEOUT_S) for _ in range(connections if self.keeps else 1)]
        try:
            self.run(self._all(asked))
        except self._errors as error:
            raise BackendError(
                f"server: GET {path} at {self.url}: no answer ({_error_line(error)})"
            ) from None

    def learn(self, body: bytes) -> Stream:
        """Send one request, and see whether another one would need a new connection.

        llama.cpp's server says that it keeps connections and closes them after each stream. A request that is
        sent before that is seen would be lost.
        """
        first = self.run(self.stream(body))
        if first.broke is None and first.status == 200:
            self.run(asyncio.sleep(CLOSE_GRACE_S))
            before = self._connected
            again = self.run(self.stream(body))
            self.keeps = again.broke is None and self._connected == before
            # Those that the server closes meanwhile are not seen to be closed while nothing runs.
            self.run(self._session.close())
            self._session = self.run(self._opened())
        return first

    async def stream(self, body: bytes) -> Stream:
        """Send one request and note when its parts come. What breaks is noted, too."""
        stream = Stream(sent_ns=time.monotonic_ns())
        try:
            async with self._session.post(self._completions, data=body, headers=JSON_HEADERS) as response:
                stream.status = response.status
                async for data in response.content.iter_any():
                    stream.reads.append((time.monotonic_ns(), data))
        except self._errors as error:
            stream.broke = _error_line(error)
        return stream

    def close(self) -> None:
        """Close the connections and the loop."""
        self.run(self._session.close())
        self._loop.close()

    async def _note_connection(self, *_: object) -> None:
        self._connected += 1

    async def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        connections = aiohttp.TraceConfig()
        connections.on_connection_create_end.append(self._note_connection)

        # A load may have any number of requests on their way, and take any time.
        kept: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S} if self.keeps else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, **kept)
        return aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trace_configs=[connections]
        )

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(self.url + path, timeout=limit) as response:
            return response.status, await response.read()

    async def _all(self, asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return list(await asyncio.gather(*asked))


def _error_line(error: BaseException) -> str:
    """An error in a line; some have no text."""
    return (str(error) or type(error).__name__).splitlines()[0][:MAX_ERROR_CHARACTERS]


# What servers of the OpenAI API understand beyond it. A field that a server does not know may be refused.


def _tokens_from_usage(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    return usage.get("completion_tokens") if usage else None


def _tokens_from_timings(event: Mapping[str, Any]) -> int | None:
    timings = event.get("timings")
    return timings.get("predicted_n") if timings else None


@dataclass(frozen=True)
class Dialect:
    """How to ask one kind of server.

    ``always`` goes with every request, ``cache`` says whether prefixes may be kept. ``so_far`` reads from a
    chunk how many tokens there are by now, where the server tells; ``stops`` is whether it takes
    ``stop_token_ids``, ``takes_top_k`` whether ``top_k``. ``version`` is the path that tells its version, and
    the field there.
    """

    name: str
    always: Mapping[str, Any] = field(default_factory=dict)
    cache: Callable[[bool], Mapping[str, Any]] = lambda _: {}
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    so_far: Callable[[Mapping[str, Any]], int | None] = lambda _: None
    stops: bool = False
    takes_top_k: bool = False
    version: tuple[str, str] | None = None

    @property
    def switches_cache(self) -> bool:
        """Whether a request says that no prefix is to be kept."""
        return bool(self.cache(False))


#: Ways to choose a token that a server would take from defaults of its own or of the model.
PLAIN_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0}
#: Of llama.cpp those that are wanted, which leaves its min_p and its penalties out.
LLAMA_CPP_SAMPLERS = ["temperature", "top_k", "top_p"]

#: By what ``/v1/models`` calls its owner.
DIALECTS = {
    # tools/server/README.md of llama.cpp: POST /completion, whose options its OpenAI endpoints take as well.
    "llamacpp": Dialect(
        "llama.cpp",
        always={"timings_per_token": True, "samplers": LLAMA_CPP_SAMPLERS},
        cache=lambda kept: {"cache_prompt": kept},
        so_far=_tokens_from_timings,
        takes_top_k=True,
        version=("/props", "build_info"),
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
    ),
    # python/sglang/srt/entrypoints/openai/protocol.py.
    "sglang": Dialect("SGLang", always=PLAIN_SAMPLING, stops=True, takes_top_k=True),
}

UNKNOWN_DIALECT = Dialect("unknown")


def select_dialect(models: Mapping[str, Any]) -> Dialect:
    """By the answer of ``GET /v1/models``."""
    owners = [str(each.get("owned_by", "")) for each in models.get("data") or ()]
    return DIALECTS.get(owners[0].lower(), UNKNOWN_DIALECT) if owners else UNKNOWN_DIALECT
