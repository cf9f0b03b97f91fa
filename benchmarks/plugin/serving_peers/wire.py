# SPDX-License-Identifier: Apache-2.0
"""Start a server behind a port that forwards every byte: ``wire.py PORT LOG INNER-PORT COMMAND…``.

The log tells what each client sent and when its tokens left, so that a tool's figures can be compared with
the truth of its own run, however much the server's speed varies from run to run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

SENT_AS = b"POST /v1/completions"
EVENT = b"data: {"
BUFFER = 1 << 16
HOST = "127.0.0.1"


class Exchange:
    """One completion: the time of the request's first byte, its body, and the time of each token."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.request = b""
        self.line = b""
        self.tokens_s: list[float] = []

    def read_answer(self, data: bytes, now_s: float) -> None:
        """Note the time of every event in ``data`` that carries a token, even one without text of its own."""
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                choices: list[dict[str, Any]] = json.loads(line[len(EVENT) - 1 :]).get("choices") or []
                if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
                    self.tokens_s.append(now_s)

    def log(self, sink: TextIO) -> None:
        """Write one line of JSON."""
        body: dict[str, Any] = json.loads(self.request.partition(b"\r\n\r\n")[2] or b"{}")
        line = {"start_s": self.start_s, "tokens_s": self.tokens_s, "body": body}
        sink.write(json.dumps(line) + "\n")
        sink.flush()


class Connection:
    """One client's connection and the server's connection behind it."""

    def __init__(self, inner: int, sink: TextIO) -> None:
        self.inner, self.sink = inner, sink
        self.current: Exchange | None = None

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Forward in both directions until either side closes."""
        try:
            server, forth = await asyncio.open_connection(HOST, self.inner)
        except OSError:
            # The server is not listening yet: the client's health check tries again.
            back.close()
            return
        up = asyncio.create_task(self._forward_request(client, forth))
        try:
            await self._forward_answer(server, back)
        except OSError:
            # A client that leaves early.
            pass
        finally:
            up.cancel()
            self._finish()
            forth.close()
            back.close()

    async def _forward_request(self, client: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        while data := await client.read(BUFFER):
            now_s = time.monotonic()
            forth.write(data)
            if data.startswith(SENT_AS):
                self._finish()
                self.current = Exchange(now_s)
            if self.current is not None:
                self.current.request += data
        forth.close()

    async def _forward_answer(self, server: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await server.read(BUFFER):
            back.write(data)
            if self.current is not None:
                self.current.read_answer(data, time.monotonic())
                if b"data: [DONE]" in data:
                    self._finish()

    def _finish(self) -> None:
        if self.current is not None:
            self.current.log(self.sink)
        self.current = None


async def main(port: str, log: str, inner: str, *command: str) -> None:
    """Serve until SIGTERM, then stop the server, too."""
    process = await asyncio.create_subprocess_exec(*command)
    with Path(log).open("w", encoding="utf-8") as sink:
        listener = await asyncio.start_server(
            lambda reader, writer: Connection(int(inner), sink).serve(reader, writer), HOST, int(port)
        )
        ended = asyncio.ensure_future(process.wait())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
        async with listener:
            await ended
    sys.exit(process.returncode)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
