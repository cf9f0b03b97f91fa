# SPDX-License-Identifier: Apache-2.0
"""A server with the OpenAI API whose times and answers are known.

Run as a program: ``server.py PORT NAME=JSON …``. It is not imported by tests.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

OPTIONS: dict[str, Any] = {
    # Seconds until the first token, and between tokens.
    "first": 0.04,
    "step": 0.01,
    # Where `usage` is: in the last chunk, in each chunk so far, or in each chunk for that chunk.
    "usage": "last",
    # Tokens in each chunk.
    "burst": 1,
    # Members of each chunk besides its own, such as "error": null.
    "members": {},
    # Every so-manyth request, from the first on, gets this event after its first chunk.
    "odd": 0,
    "event": '{"choices": [{"index": 0, "te',
    # Text of each token, and in hexadecimal bytes that begin the stream.
    "token": " a",
    "begin": "",
    # Bytes that end it, and for how many seconds the connection stays open.
    "done": "data: [DONE]\n\n",
    "linger": 0,
    # Endpoints that exist, and other paths with their answers.
    "endpoints": ["completions", "chat/completions"],
    "gets": {"/health": 200, "/v1/models": 200},
    # Whether all answers are a page.
    "page": False,
    # Whether it answers a stream.
    "streams": True,
    # A key that requests must have.
    "key": None,
    # How many prompt tokens are said to be in a cache.
    "cached": 0,
    # Most tokens of a prompt, which is cut to them.
    "cuts": 100000,
    # Tokens of context.
    "context": 100000,
    # Another port to which requests are sent on.
    "redirect": 0,
    # Whether a request beyond the first so many is refused.
    "refuse_after": 0,
    # Line end of the stream of events.
    "newline": "\n",
}
OPTIONS |= {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
NUMBERS = count(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def answer(self, status: int, value: object, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-type": "application/json", **headers}.items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def page(self) -> None:
        body = b"<!doctype html><title>A page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def authorized(self) -> bool:
        key = OPTIONS["key"]
        if key is None or self.headers.get("authorization") == f"Bearer {key}":
            return True
        self.answer(401, {"error": {"message": f"no such key: {self.headers.get('authorization')}"}})
        return False

    def do_GET(self) -> None:
        status = OPTIONS["gets"].get(self.path, 404)
        if OPTIONS["page"]:
            self.page()
        elif status != 200:
            self.answer(status, {"error": {"message": "not found"}})
        elif self.path == "/health":
            self.answer(200, {})
        elif self.authorized():
            self.answer(200, {"object": "list", "data": [{"id": "known", "object": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if OPTIONS["page"]:
            self.page()
            return
        if self.path.removeprefix("/v1/") not in OPTIONS["endpoints"]:
            self.answer(404, {"error": {"message": "not found"}})
            return
        if OPTIONS["redirect"]:
            self.answer(307, {}, location=f"http://127.0.0.1:{OPTIONS['redirect']}{self.path}")
            return
        if not self.authorized():
            return
        number = next(NUMBERS)
        if OPTIONS["refuse_after"] and number > OPTIONS["refuse_after"]:
            self.answer(503, {"error": {"message": "too much"}})
            return
        chat = self.path.endswith("chat/completions")
        prompt = asked["messages"] if chat else asked["prompt"]
        words = (
            sum(len(str(each["content"]).split()) for each in prompt) if chat else len(str(prompt).split())
        )
        words = min(words, OPTIONS["cuts"])
        tokens = min(int(asked["max_tokens"]), OPTIONS["context"] - words)
        usage = {
            "prompt_tokens": words,
            "completion_tokens": tokens,
            "total_tokens": words + tokens,
            "prompt_tokens_details": {"cached_tokens": OPTIONS["cached"]},
        }
        if not OPTIONS["streams"]:
            choice = {"index": 0, "text": "a" * tokens, "finish_reason": "length"}
            self.answer(200, {"model": "known", "choices": [choice], "usage": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(bytes.fromhex(OPTIONS["begin"]))
        due = time.monotonic() + OPTIONS["first"]
        for made in range(0, tokens, OPTIONS["burst"]):
            time.sleep(max(0.0, due - time.monotonic()))
            due += OPTIONS["step"]
            now = min(OPTIONS["burst"], tokens - made)
            chunk = self.chunk(chat, now, last=made + now == tokens)
            if OPTIONS["usage"] == "so far":
                chunk["usage"] = usage | {"completion_tokens": made + now}
            elif OPTIONS["usage"] == "of the chunk":
                chunk["usage"] = usage | {"completion_tokens": now}
            self.event(json.dumps(chunk))
            if OPTIONS["odd"] and number % OPTIONS["odd"] == 0 and made == 0:
                self.event(OPTIONS["event"])
        if OPTIONS["usage"] == "last":
            self.event(json.dumps({"model": "known", "choices": [], "usage": usage}))
        self.wfile.write(OPTIONS["done"].encode())
        self.wfile.flush()
        time.sleep(OPTIONS["linger"])

    def chunk(self, chat: bool, tokens: int, *, last: bool) -> dict[str, Any]:
        said = OPTIONS["token"] * tokens
        text: dict[str, Any] = {"delta": {"content": said}} if chat else {"text": said}
        choice = {"index": 0, "finish_reason": "length" if last else None, **text}
        return {"id": "x", "model": "known", "choices": [choice], **OPTIONS["members"]}

    def event(self, data: str) -> None:
        end = OPTIONS["newline"]
        self.wfile.write(f"data: {data}{end}{end}".encode())
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
