# SPDX-License-Identifier: Apache-2.0
"""Text for people: printable strings, counts, suggestions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

#: Most characters of the name of a test.
MAX_NAME_LENGTH = 160

#: Similarity (difflib's ratio) above which an unknown name is taken for a misspelling of a known one.
MIN_SIMILARITY = 0.7


def escape_surrogates(value: Any) -> Any:
    """Escape lone surrogates, which UTF-8 cannot encode, in JSON primitives.

    File names and messages may contain them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [escape_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {escape_surrogates(name): escape_surrogates(each) for name, each in value.items()}
    return value


def one_line(text: str) -> str:
    """Join the lines of a text, and escape invisible characters such as direction marks."""
    return escape_invisible(" ".join(text.split()))


def escape_invisible(text: str) -> str:
    """Escape every invisible character, line breaks included."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def count_tests(count: int, kind: str = "") -> str:
    """Return ``1 test`` or ``2 tests``; with the kind ``"new "`` ``2 new tests``."""
    return f"{count} {kind}test{'' if count == 1 else 's'}"


def shorten(line: str, width: int) -> str:
    """Cut a line to ``width`` characters in its middle, since names of tests differ at the end."""
    return line if len(line) <= width else f"{line[: width // 2]}…{line[1 - width // 2 :]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def short_test_name(name: str) -> str:
    """Return a test id without its directories, on one line of limited length."""
    path, bracket, params = name.partition("[")
    return shorten(one_line(f"{path.rpartition('/')[2]}{bracket}{params}"), MAX_NAME_LENGTH)


def did_you_mean(unknown: Iterable[str], known: Collection[str]) -> str:
    """Return a question that suggests the most similar known names, or an empty string."""
    similar = [
        name for each in unknown for name in get_close_matches(each, known, n=1, cutoff=MIN_SIMILARITY)
    ]
    return f"did you mean {' and '.join(dict.fromkeys(similar))}?" if similar else ""


def format_time(moment: datetime) -> str:
    """Format a time in UTC by RFC 3339, to the second."""
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def relative_path(path: Path) -> str:
    """Return a path relative to the current directory, or unchanged if it is outside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
