# SPDX-License-Identifier: Apache-2.0
"""The pages, and their blocks of code as a Markdown parser finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from .notes import Note, parse_note

ROOT = Path(__file__).parents[2]

#: Everything that is published, without what sphinx has built.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]


@dataclass(frozen=True)
class Block:
    """A fenced block with the comments directly above it; ``line`` is the line of its fence."""

    page: Path
    line: int
    language: str
    code: str
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def commands(self) -> str:
        """The commands of a block of shell, without the output that a block of ``console`` shows as well."""
        if self.language == "console":
            return "\n".join(line[2:] for line in self.code.splitlines() if line.startswith("$ "))
        return self.code if self.language == "sh" else ""

    def said(self, name: str) -> str | None:
        """Return the text of the comment of this name, or None."""
        return next((note.text for note in self.notes if note.name == name and not note.lines), None)

    def lines(self, name: str) -> list[Note]:
        """Return the comments of this name that hold lines."""
        return [note for note in self.notes if note.name == name and note.lines]


def name_of(page: Path) -> str:
    """Return the name of a page for messages."""
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return every block of a page, without directives such as ``{image}``, which sphinx checks."""
    return tuple(_blocks(page, tokens(page.read_text())))


def block(page: Path, file: str) -> Block:
    """Return the block of a page that is this file. Raises ``KeyError``."""
    for each in blocks(page):
        if each.said("file") == file:
            return each
    raise KeyError(f"{name_of(page)} has no block that is {file}")


def tokens(text: str) -> list[Token]:
    """Parse Markdown."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def _blocks(page: Path, found: list[Token]) -> Iterator[Block]:
    above: list[Token] = []
    for token in found:
        if token.type in ("fence", "code_block") and not token.info.startswith("{"):
            line = (token.map or [0])[0] + 1
            yield Block(
                page, line, token.info.strip(), token.content, tuple(parse_note(each) for each in above)
            )
        above = [*above, token] if token.type == "html_block" else []
