# SPDX-License-Identifier: Apache-2.0
"""One JSON request, and what became of it in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pytest_llenergy.errors import ForgeError

TIMEOUT_S = 30

#: Entries of a list that are looked at, at most.
MOST_ENTRIES = 10_000

NEXT = re.compile(r'<([^>]+)>\s*;[^,]*\brel="next"')


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would carry the token to wherever it leads."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Api:
    """An address that JSON is sent to, and the ``headers`` that say who sends it."""

    url: str
    headers: Mapping[str, str]
    service: str

    def __post_init__(self) -> None:
        """Raises ``ForgeError`` for an address that is none."""
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ForgeError(f"{self.service}: {self.url!r} is no address of an API, expected https://…")

    def send(self, method: str, path: str, body: object = None) -> Any:
        """The answer as data. Raises ``ForgeError`` with the status and what the service says."""
        return self._send(method, f"{self.url.rstrip('/')}/{path}", body)[0]

    def pages(self, path: str) -> Iterator[Any]:
        """The entries of a list that comes in pages. Raises ``ForgeError``."""
        return islice(self._entries(path), MOST_ENTRIES)

    def _entries(self, path: str) -> Iterator[Any]:
        url: str | None = f"{self.url.rstrip('/')}/{path}"
        while url is not None:
            found, url = self._send("GET", url)
            yield from found

    def _send(self, method: str, url: str, body: object = None) -> tuple[Any, str | None]:
        if urlsplit(url)[:2] != urlsplit(self.url)[:2]:
            raise ForgeError(f"{self.service}: the next page is said to be on another host, {url}")
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "User-Agent": "pytest-llenergy", "Content-Type": "application/json"}
        request = Request(url, data, headers, method=method)
        try:
            with build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer), _next(answer.headers.get("Link", ""))
        except HTTPError as error:
            told = _told(error)
            raise ForgeError(f"{self.service} refused {method} {url}: {error.code} {told}") from None
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ForgeError(f"{self.service} could not be asked at {url} ({reason})") from None


def _next(link: str) -> str | None:
    found = NEXT.search(link)
    return found[1] if found else None


def _told(error: HTTPError) -> str:
    """What the service says of a refusal, on one line."""
    try:
        told = json.load(error)
    except (OSError, ValueError):
        return str(error.reason)
    message = told.get("message") or told.get("error") if isinstance(told, dict) else None
    return " ".join(str(message or error.reason).split())[:300]
