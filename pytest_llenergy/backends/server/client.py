# SPDX-License-Identifier: Apache-2.0
"""HTTP client of one server: requests whose streams are recorded, byte by byte, and read later."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pytest_llenergy.backends.secrets import hide_keys
from pytest_llenergy.backends.server.events import parse_json
from pytest_llenergy.backends.timeouts import END_WAIT_S, REQUEST_TIMEOUT_S

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

COMPLETIONS_PATH = "/v1/completions"
#: Path of each endpoint.
PATHS = {"completions": COMPLETIONS_PATH, "chat": "/v1/chat/completions"}

#: The last event, where nothing follows it, and how many bytes to look at.
END_OF_STREAM, TAIL_BYTES = re.compile(rb"data: ?\[DONE\]\s*\Z"), 64

#: Longest error text that is shown.
MAX_ERROR_CHARACTERS = 300


@dataclass
class Stream:
    """The answer to one request: bytes with their arrival times.

    Attributes:
        sent_ns: When it was sent (monotonic nanoseconds).
        status: Status of the answer; 0 without one.
        broke: Why it broke off; None if it did not.
        media: Its content type.
    """

    sent_ns: int = 0
    status: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    broke: str | None = None
    path: str = COMPLETIONS_PATH
    media: str = ""
    location: str = ""

    @property
    def failed(self) -> bool:
        """Whether it was refused or broke off, as far as can be seen without parsing it."""
        return self.broke is not None or self.status != 200

    def body(self) -> str:
        """Return the whole body as text."""
        return b"".join(data for _, data in self.reads).decode(errors="replace")

    def json(self) -> Any:
        """Return the decoded body; None for anything but success and JSON."""
        try:
            return None if self.failed else parse_json(self.body())
        except ValueError:
            return None


class Client:
    """Client of one server, with one event loop. Each request has a connection of its own.

    Methods block, except ``stream``, a coroutine for ``run``.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        import aiohttp

        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._loop = asyncio.new_event_loop()
        self._errors = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError)
        self._session: aiohttp.ClientSession = self.run(self._open_session())

    async def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        async def note_sending(_session: Any, context: Any, _params: Any) -> None:
            # Latencies are those of the server, without the time to connect.
            context.trace_request_ctx.sent_ns = time.monotonic_ns()

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(note_sending)
        return aiohttp.ClientSession(
            # No limits: a load can have any number of requests in flight, and take any time. The server is on
            # this host, where certificates are of no use. One that closes each connection, as llama.cpp's
            # does although it says that it keeps them, would lose requests sent over an old one.
            connector=aiohttp.TCPConnector(limit=0, ssl=False, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def get(self, path: str, timeout_s: float = REQUEST_TIMEOUT_S) -> Stream:
        """Return the answer to a request without a body."""
        return self.run(self.stream(None, path, timeout_s))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the decoded answer of a request outside of any load; None for anything but success."""
        return self.run(self.stream(msgspec.json.encode(body), path, REQUEST_TIMEOUT_S)).json()

    async def stream(
        self,
        body: bytes | None,
        path: str = COMPLETIONS_PATH,
        timeout_s: float | None = None,
    ) -> Stream:
        """Send one request and record when its parts arrive. Failures are recorded, too."""
        import aiohttp

        stream = Stream(sent_ns=time.monotonic_ns(), path=path)
        tail = b""
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=body,
                headers=self._headers,
                trace_request_ctx=stream,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                stream.status = response.status
                stream.media = response.content_type
                stream.location = response.headers.get("Location", "")[:MAX_ERROR_CHARACTERS]
                while data := await asyncio.wait_for(
                    response.content.readany(), END_WAIT_S if END_OF_STREAM.search(tail) else None
                ):
                    stream.reads.append((time.monotonic_ns(), data))
                    tail = (tail + data)[-TAIL_BYTES:]
        except asyncio.TimeoutError:
            stream.broke = "a time-out" if timeout_s is None else f"not done after {timeout_s:g} s"
        except self._errors as error:
            stream.broke = _error_line(error)
        if END_OF_STREAM.search(tail):
            # Some servers neither end the answer nor close the connection, or do it wrong.
            stream.broke = None
        return stream

    def close(self) -> None:
        """Close the connections and the loop."""
        self.run(self._session.close())
        self._loop.close()


def _error_line(error: BaseException) -> str:
    """Return an error in one line; some have no text, or a message besides a status that is no answer's."""
    text = str(getattr(error, "message", "") or error).partition(": <TransferEncodingError")[0]
    lines = text.splitlines() or [type(error).__name__]
    return hide_keys(lines[0].rstrip(":"))[:MAX_ERROR_CHARACTERS]
