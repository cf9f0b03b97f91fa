# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI API that behaves as its settings say: scripted.py PORT [SETTING=VALUE …].

It counts a token for each letter of a prompt. Each chunk of ``chunk`` tokens takes ``step`` seconds, the
first one ``first``. ``fault`` is what it does wrong. A prompt that contains ``!500``, ``!drop`` or ``!hang``
is refused, broken off or not answered for a minute. A chat prompt has ``template`` more tokens. With
``cached=prefix`` the longest beginning that a prompt shares with an earlier one is cached.

With ``slots``, so many requests are served at once and the others wait, first come, first served: the
capacity is ``slots / (first + step * (chunks - 1))`` requests per second. Every fourth request that makes
several chunks waits ``stall`` seconds before its last.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SETTINGS = {
    **{"fault": "", "owner": "scripted", "chunk": "1", "first": "0", "step": "0"},
    **{"cached": "0", "short": "0", "wait": "0", "slots": "0", "stall": "0", "template": "5"},
    "models": "tiny",
}
#: What was asked, in order, and the prompts.
ASKED: list[dict[str, Any]] = []
PROMPTS: list[str] = []
STARTED_S = time.monotonic()


class Slots:
    """Serves so many requests at once, in the order of their arrival."""

    def __init__(self, number: int) -> None:
        self.free = number
        self.waiting: deque[threading.Event] = deque()
        self.lock = threading.Lock()

    def take(self) -> None:
        turn = threading.Event()
        with self.lock:
            if self.free:
                self.free -= 1
                return
            self.waiting.append(turn)
        turn.wait()

    def give(self) -> None:
        with self.lock:
            if self.waiting:
                self.waiting.popleft().set()
            else:
                self.free += 1


SLOTS = Slots(10**6)
#: Numbers the requests that make several chunks.
NUMBERS = itertools.count(1)


def common_prefix(one: str, other: str) -> str:
    """The longest beginning of both."""
    ends = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(ends, min(len(one), len(other)))]


class Handler(BaseHTTPRequestHandler):
    """Streams completions; every connection is kept."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            ready = time.monotonic() - STARTED_S >= float(SETTINGS["wait"])
            self.say(200 if ready else 503, {"error": {"message": "Loading model"}})
        elif self.path == "/asked":
            self.say(200, {"asked": ASKED})
        elif self.path == "/v1/models":
            self.say(
                200,
                {
                    "data": [
                        {"id": each, "owned_by": SETTINGS["owner"]} for each in SETTINGS["models"].split(",")
                    ]
                },
            )
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.say(200, {"count": self.count(asked)})
            return
        ASKED.append(asked)
        if asked["model"] not in SETTINGS["models"].split(","):
            self.say(404, {"error": {"message": f"The model `{asked['model']}` does not exist."}})
            return
        prompt = self.prompt(asked)
        if "!500" in prompt:
            self.say(500, {"error": {"message": "out of memory"}})
            return
        if "!hang" in prompt:
            time.sleep(60)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        SLOTS.take()
        try:
            self.stream(asked)
        finally:
            SLOTS.give()

    def stream(self, asked: dict[str, Any]) -> None:
        total = asked["max_tokens"] - (int(SETTINGS["short"]) if asked.get("ignore_eos") else 0)
        prompt = self.prompt(asked)
        usage: dict[str, Any] = {"prompt_tokens": self.count(asked)}
        if SETTINGS["cached"] == "prefix":
            shared = max((len(common_prefix(prompt, each)) for each in PROMPTS), default=0)
            PROMPTS.append(prompt)
            usage["prompt_tokens_details"] = {"cached_tokens": shared}
        else:
            usage["prompt_tokens_details"] = {"cached_tokens": int(SETTINGS["cached"])}
        if "messages" in asked:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        counted = asked["stream_options"].get("continuous_usage_stats")
        made = 0
        stalls = total > int(SETTINGS["chunk"]) and next(NUMBERS) % 4 == 0
        while made < total:
            time.sleep(float(SETTINGS["step" if made else "first"]))
            if stalls and made + int(SETTINGS["chunk"]) >= total:
                time.sleep(float(SETTINGS["stall"]))
            now = min(int(SETTINGS["chunk"]), total - made)
            made += now
            said = {"delta": {"content": "ab"[:now]}} if "messages" in asked else {"text": "ab"[:now]}
            event: dict[str, Any] = {"choices": [{**said, "finish_reason": None}]}
            if counted:
                message = 1 if SETTINGS["fault"] == "miscounts" else made
                event["usage"] = {**usage, "completion_tokens": message}
            self.event(event)
            if "!drop" in prompt:
                self.close_connection = True
                return
        last: dict[str, Any] = {"delta": {}} if "messages" in asked else {"text": ""}
        finish = "length" if total == asked["max_tokens"] else "stop"
        self.event({"choices": [{**last, "finish_reason": finish}]})
        self.event({"choices": [], "usage": {**usage, "completion_tokens": total}})
        self.part(b"data: [DONE]\n\n")
        self.part(b"")
        self.close_connection = self.close_connection or SETTINGS["fault"] == "closes"

    def prompt(self, asked: dict[str, Any]) -> str:
        return asked.get("prompt") or "".join(
            f"|{each['role']}|{each['content']}" for each in asked["messages"]
        )

    def count(self, asked: dict[str, Any]) -> int:
        messages = asked.get("messages")
        if messages is None:
            return len(asked["prompt"])
        return sum(len(each["content"]) + int(SETTINGS["template"]) for each in messages)

    def event(self, event: dict[str, Any]) -> None:
        # Some clients refuse events without their kind.
        whole = {"object": "text_completion", **event}
        self.part(b"data: " + json.dumps(whole).encode() + b"\n\n")

    def part(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Quiet."""


def main(port: str, *settings: str) -> None:
    for name, _, value in (setting.partition("=") for setting in settings):
        SETTINGS[name] = value
    if SETTINGS["slots"] != "0":
        SLOTS.free = int(SETTINGS["slots"])
    print("scripted server", flush=True)
    if SETTINGS["fault"] == "dies":
        sys.exit("no memory for the model")
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
