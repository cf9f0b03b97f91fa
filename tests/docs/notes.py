# SPDX-License-Identifier: Apache-2.0
"""Comments above a block that say how to try it; CONTRIBUTING.md describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it.token import Token

#: Names of comments; those with ``…`` need text after a colon.
KNOWN = {
    "file": "…",
    "append": "…",
    "before": "",
    "with": "…",
    "run": "",
    "not run": "…",
    "exit": "…",
}
#: The only text that ``run`` accepts.
EXIT = re.compile(r"exit (\d+)")


@dataclass(frozen=True)
class Note:
    """A comment: a name of ``KNOWN``, the text after it on its line, and the lines below."""

    name: str
    text: str
    lines: str = ""


def parse_note(comment: Token) -> Note:
    """Parse a comment. Raises ``ValueError`` with the line number if it is not valid."""
    line = (comment.map or [0])[0] + 1
    found = re.fullmatch(r"\s*<!--(.*?)-->\s*", comment.content, re.DOTALL)
    if found is None:
        raise ValueError(f"line {line}: HTML directly above a block: {comment.content.strip()}")
    first, _, rest = found[1].strip("\n").partition("\n")
    name, _, text = (part.strip() for part in first.partition(":"))
    if name not in KNOWN:
        raise ValueError(f"line {line}: {name!r} above a block; known are: {', '.join(KNOWN)}")
    if KNOWN[name] and not text:
        raise ValueError(f"line {line}: {name} says nothing")
    if name == "before" and (text or not rest.strip()):
        raise ValueError(f"line {line}: the lines of before stand below it")
    if name == "run" and text and not EXIT.fullmatch(text):
        raise ValueError(f"line {line}: run says {text!r}; it may say: exit N")
    if rest.strip() and name not in ("file", "before"):
        raise ValueError(f"line {line}: {name} has one line")
    return Note(name, text, f"{rest.rstrip()}\n" if rest.strip() else "")
