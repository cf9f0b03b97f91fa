# SPDX-License-Identifier: Apache-2.0
"""Comments above a block: what is done with it, as CONTRIBUTING.md says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it.token import Token

#: What a comment may say on its first line, after a colon where a ``…`` stands here.
KNOWN = {
    "file": "…",
    "before": "",
    "with": "…",
    "run": "",
    "not run": "…",
}
#: The one thing that ``run`` may say more.
EXIT = re.compile(r"exit (\d+)")


@dataclass(frozen=True)
class Note:
    """``name`` is of ``KNOWN``, ``text`` what follows on its line, ``lines`` what stands below it."""

    name: str
    text: str
    lines: str = ""


def read_note(comment: Token) -> Note:
    """Read one. Raises ``ValueError`` that names the line where it says nothing that is known."""
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
