# SPDX-License-Identifier: Apache-2.0
"""A server that keeps comments as the documentation of GitHub and GitLab describes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Entries of a page: few, so that tests have several pages.
PAGE = 2

ME, SOMEBODY = 7, 8


@dataclass
class Forge:
    """State of the server.

    ``refuses`` is the status that answers a write, ``bot`` whether the token belongs to a bot, and
    ``redirects_to`` the address to which every request is redirected.
    """

    address: str = ""
    token: str = "secret"
    bot: bool = True
    comments: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    refuses: int | None = None
    redirects_to: str = ""
    #: Answers of the next requests: status, body and headers.
    answers: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)

    def has(self, body: str, by: int = ME) -> None:
        """Keep a comment."""
        user = {"id": by, "type": "Bot" if self.bot and by == ME else "User"}
        self.comments.append({"id": 100 + len(self.comments), "body": body, "user": user, "author": user})

    @property
    def bodies(self) -> list[str]:
        return [each["body"] for each in self.comments]


class _Handler(BaseHTTPRequestHandler):
    forge: Forge

    def log_message(self, *_: Any) -> None:
        """Do not log."""

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path.endswith("/user"):
            self._answer(
                403 if self.forge.bot and "repos" not in path and self._is_github else 200, {"id": ME}
            )
        elif path.endswith("/pulls"):
            owner, branch = query["head"][0].split(":")
            found = [each for each in self.forge.pulls if each["head"]["ref"] == branch and owner == "them"]
            self._page(found, query)
        else:
            self._page(self.forge.comments, query)

    def do_POST(self) -> None:
        self._write(lambda body: self.forge.has(body))

    def do_PATCH(self) -> None:
        self._write(self._replace)

    def do_PUT(self) -> None:
        self._write(self._replace)

    @property
    def _is_github(self) -> bool:
        return "Authorization" in self.headers

    def _replace(self, body: str) -> None:
        self._named()["body"] = body

    def _named(self) -> dict[str, Any]:
        number = int(re.findall(r"\d+", self.path)[-1])
        return next((each for each in self.forge.comments if each["id"] == number), self.forge.comments[-1])

    def _write(self, change: Any) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
        if self.forge.refuses:
            self._answer(self.forge.refuses, {"message": "Resource not accessible by integration"})
            return
        change(body)
        found = self._named() if self.command != "POST" else self.forge.comments[-1]
        self._answer(200, {**found, "html_url": f"https://forge/#{found['id']}"})

    def _page(self, entries: list[dict[str, Any]], query: dict[str, list[str]]) -> None:
        page = int(query.get("page", ["1"])[-1])
        self._answer(200, entries[(page - 1) * PAGE : page * PAGE])

    def _answer(self, status: int, data: Any) -> None:
        self.forge.asked.append(f"{self.command} {self.path}")
        if self.forge.answers:
            status, text, headers = self.forge.answers.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or self.headers["PRIVATE-TOKEN"]
        if given != self.forge.token:
            status, data = 401, {"message": "Bad credentials"}
        if self.forge.redirects_to:
            status = 302
        self.send_response(status)
        if self.forge.redirects_to:
            self.send_header("Location", self.forge.redirects_to + self.path)
        self.end_headers()
        if data is not None:
            self.wfile.write(json.dumps(data).encode())


@contextmanager
def serving(forge: Forge) -> Iterator[Forge]:
    """Serve the forge on a free local port."""
    handler = type("Handler", (_Handler,), {"forge": forge})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        forge.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield forge
        server.shutdown()
