# SPDX-License-Identifier: Apache-2.0
"""Links and pictures of a page, as a Markdown parser finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from markdown_it.token import Token

from .pages import tokens

#: The beginning of an address that is not a file of this repository.
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:", re.IGNORECASE)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yield each link and picture with the line of its paragraph."""
    for token in tokens(page.read_text()):
        line = (token.map or [0])[0] + 1
        if token.type == "html_block":
            yield from ((line, target) for target in _of_html(token.content))
        if token.type == "fence" and token.info.startswith("{image} "):
            yield line, token.info.removeprefix("{image} ").strip()
        for child in token.children or ():
            yield from ((line, target) for target in _of_inline(child))


def _of_inline(token: Token) -> Iterator[str]:
    for attribute in ("href", "src"):
        target = token.attrGet(attribute)
        if target is not None:
            yield str(target)
    if token.type == "html_inline":
        yield from _of_html(token.content)


def _of_html(text: str) -> list[str]:
    reader = _Reader()
    reader.feed(text)
    return reader.targets


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name == "srcset" and value:
                self.targets += [each.split()[0] for each in value.split(",")]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the headings, by the rule of GitHub and MyST."""
    found = tokens(page.read_text())
    titles = [after.content for token, after in pairwise(found) if token.type == "heading_open"]
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
