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

METHODS = (b"GET ", b"POST ")
SENT_AS = b"POST /v1/completions"
DONE = b"data: [DONE]"
EVENT = b"data: {"
BUFFER = 1 << 16
HOST = "127.0.0.1"


class Exchange:
    """One completion: the time of the request's first byte, its body, and the times of its tokens.

    ``texts_s`` has those of the tokens with text: one such as the first byte of a character has none.
    """

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.request = b""
        self.line = b""
        self.tokens_s: list[float] = []
        self.texts_s: list[float] = []

    def read_answer(self, data: bytes, now_s: float) -> None:
        """Note the time of every event in ``data`` that carries a token, with or without text of its own."""
        *lines, self.line = (self.line + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                choices: list[dict[str, Any]] = json.loads(line[len(EVENT) - 1 :]).get("choices") or []
                if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
                    self.tokens_s.append(now_s)
                if choices and choices[0].get("text"):
                    self.texts_s.append(now_s)

    def log(self, sink: TextIO) -> None:
        """Write one line of JSON."""
        body: dict[str, Any] = json.loads(self.request.partition(b"\r\n\r\n")[2] or b"{}")
        times = {"start_s": self.start_s, "tokens_s": self.tokens_s, "texts_s": self.texts_s}
        sink.write(json.dumps({**times, "body": body}) + "\n")
        sink.flush()


class Connection:
    """One client's connection. Each of its requests gets a connection of its own to the server.

    llama.cpp's server closes a connection after each stream, though it says that it keeps it. Clients that
    believe it would lose requests.
    """

    def __init__(self, inner: int, sink: TextIO) -> None:
        self.inner, self.sink = inner, sink
        self.current: Exchange | None = None
        self.forth: asyncio.StreamWriter | None = None
        self.answer: asyncio.Task[None] | None = None

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Forward in both directions until the client closes, or the server does within an answer."""
        try:
            while data := await client.read(BUFFER):
                now_s = time.monotonic()
                if data.startswith(METHODS):
                    await self._open(back)
                    self.current = Exchange(now_s) if data.startswith(SENT_AS) else None
                if self.current is not None:
                    self.current.request += data
                if self.forth is not None:
                    self.forth.write(data)
        except OSError:
            # The server is not listening yet, and the health check tries again; or a client left early.
            pass
        finally:
            self._close()
            back.close()

    async def _open(self, back: asyncio.StreamWriter) -> None:
        self._close()
        server, self.forth = await asyncio.open_connection(HOST, self.inner)
        self.answer = asyncio.create_task(self._forward_answer(server, back))

    async def _forward_answer(self, server: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await server.read(BUFFER):
            back.write(data)
            if self.current is not None:
                self.current.read_answer(data, time.monotonic())
                if DONE in data:
                    self._log()
        if self.current is not None:
            back.close()

    def _close(self) -> None:
        self._log()
        if self.answer is not None:
            self.answer.cancel()
        if self.forth is not None:
            self.forth.close()

    def _log(self) -> None:
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
