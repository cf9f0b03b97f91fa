# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI API with a known capacity: queueing.py PORT [slots=N] [service=SECONDS].

Each of ``slots`` serves one request in exactly ``service`` seconds, and requests wait in the order of their
arrival: the capacity is slots / service requests per second. The first token comes when the service begins,
the others at even times until it ends. Times are computed from arrivals, so a busy host delays chunks but
does not lower the capacity. The connection of a request after the first ``breaks`` is dropped. The file
``orders`` may contain what else the server does: ``refuse`` what is sent while it is busy, ``close`` for all
requests, ``cache`` a token of each prompt, or ``exit``. A line for each start goes to the file ``orders`` +
``.starts``.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

SETTINGS = {"slots": "2", "service": "0.1", "breaks": "0", "orders": os.devnull}


class Queue:
    """Slots that serve in the order of arrival."""

    def __init__(self, slots: int, service_s: float) -> None:
        self.free_s = [0.0] * slots
        self.service_s = service_s
        self.served = 0
        self.in_flight = 0

    def start_s(self, arrived_s: float) -> float:
        """Take a slot; return when the service begins."""
        begin_s = max(arrived_s, heapq.heappop(self.free_s))
        heapq.heappush(self.free_s, begin_s + self.service_s)
        return begin_s


async def complete(request: web.Request) -> web.StreamResponse:
    loop = asyncio.get_running_loop()
    arrived_s = loop.time()
    asked = await request.json()
    queue: Queue = request.app["queue"]
    total = asked["max_tokens"]
    order = Path(SETTINGS["orders"]).read_text() if total > 1 else ""
    if order == "exit":
        os._exit(3)
    if order == "close" or (order == "refuse" and queue.in_flight):
        return web.Response(status=503, text="queue full")
    # The backend's probes ask for one token; they take no slot.
    begin_s = queue.start_s(arrived_s) if total > 1 else arrived_s
    queue.served += total > 1
    queue.in_flight += 1
    try:
        return await serve(request, begin_s, total, int(order == "cache"))
    finally:
        queue.in_flight -= 1


async def serve(request: web.Request, begin_s: float, total: int, cached: int) -> web.StreamResponse:
    loop, queue, asked = asyncio.get_running_loop(), request.app["queue"], await request.json()
    if int(SETTINGS["breaks"]) and queue.served > int(SETTINGS["breaks"]):
        assert request.transport is not None
        request.transport.abort()
    answer = await begin_stream(request)
    for made in range(total):
        due_s = begin_s + queue.service_s * made / max(1, total - 1)
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        await send(answer, {"choices": [{"text": "a", "finish_reason": None}]})
    usage: dict[str, Any] = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": total}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    await send(answer, {"choices": [{"text": "", "finish_reason": "length"}]})
    await send(answer, {"choices": [], "usage": usage})
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


async def begin_stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    return answer


async def send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny", "owned_by": "queueing"}]})


async def health(_: web.Request) -> web.Response:
    return web.Response()


def main(port: str, *settings: str) -> None:
    for name, _, value in (setting.partition("=") for setting in settings):
        SETTINGS[name] = value
    if SETTINGS["orders"] != os.devnull:
        with Path(f"{SETTINGS['orders']}.starts").open("a") as starts:
            print("started", file=starts)
    app = web.Application()
    app["queue"] = Queue(int(SETTINGS["slots"]), float(SETTINGS["service"]))
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
