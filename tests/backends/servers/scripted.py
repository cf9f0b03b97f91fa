# SPDX-License-Identifier: Apache-2.0
"""A server of the OpenAI API that behaves as its settings say: scripted.py PORT [SETTING=VALUE …].

It counts a token for each letter of a prompt. Each chunk of ``chunk`` tokens takes ``step`` seconds, the
first one ``first``. ``fault`` is what it does wrong.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SETTINGS = {
    **{"fault": "", "owner": "scripted", "chunk": "1", "first": "0", "step": "0"},
    **{"cached": "0", "short": "0", "wait": "0"},
}
STARTED_S = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    """Streams completions; every connection is kept."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            ready = SETTINGS["fault"] != "sick" and time.monotonic() - STARTED_S >= float(SETTINGS["wait"])
            self.say(200 if ready else 503, {"error": {"message": "Loading model"}})
        elif self.path == "/v1/models":
            self.say(200, {"data": [{"id": "tiny", "owned_by": SETTINGS["owner"]}]})
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "tiny":
            self.say(404, {"error": {"message": f"The model `{asked['model']}` does not exist."}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.stream(asked)

    def stream(self, asked: dict[str, Any]) -> None:
        total = asked["max_tokens"] - (int(SETTINGS["short"]) if asked.get("ignore_eos") else 0)
        usage: dict[str, Any] = {"prompt_tokens": len(asked["prompt"])}
        if SETTINGS["cached"] != "untold":
            usage["prompt_tokens_details"] = {"cached_tokens": int(SETTINGS["cached"])}
        counted = asked["stream_options"].get("continuous_usage_stats")
        made = 0
        while made < total:
            time.sleep(float(SETTINGS["step" if made else "first"]))
            now = min(int(SETTINGS["chunk"]), total - made)
            made += now
            event: dict[str, Any] = {"choices": [{"text": "ab"[:now], "finish_reason": None}]}
            if counted:
                message = 1 if SETTINGS["fault"] == "miscounts" else made
                event["usage"] = {**usage, "completion_tokens": message}
            if SETTINGS["fault"] == "odd":
                event["choices"] = [None]
            self.event(event)
            if SETTINGS["fault"] == "drops" and asked["max_tokens"] > 1:
                self.close_connection = True
                return
        self.event({"choices": [{"text": "", "finish_reason": "length"}]})
        if SETTINGS["fault"] != "no-usage":
            self.event({"choices": [], "usage": {**usage, "completion_tokens": total}})
        self.part(b"data: [DONE]\n\n")
        self.part(b"")
        self.close_connection = self.close_connection or SETTINGS["fault"] == "closes"

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
    print("scripted server", flush=True)
    if SETTINGS["fault"] == "dies":
        sys.exit("no memory for the model")
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
