# SPDX-License-Identifier: Apache-2.0
"""Text that can be stored: file names and messages may hold characters that UTF-8 has no place for."""

from __future__ import annotations

from typing import Any

#: For encodings that lack them: as wide as what they stand for, so that columns stay in line.
ASCII = {
    " ± ": "+/-",
    " … ": "...",
    "±": "~",
    "…": "~",
    "─": "-",
    "·": "-",
    "→": ">",
    "×": "x",
    "°": " ",
    "α": "a",
}


def storable(value: Any) -> Any:
    """The same JSON primitives with every lone surrogate written as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [storable(each) for each in value]
    if isinstance(value, dict):
        return {storable(name): storable(each) for name, each in value.items()}
    return value


def one_line(text: str) -> str:
    """Text on one line; what cannot be seen, such as marks that turn the direction of writing, is escaped."""
    return visible(" ".join(text.split()))


def visible(text: str) -> str:
    """Text with every character that cannot be seen as its escape, those between lines too."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def writable(text: str, encoding: str) -> str:
    """Text in what the encoding has: signs of the tables in ASCII, as wide, the rest as escapes."""
    for sign, plain in ASCII.items():
        if _lacks(encoding, sign):
            text = text.replace(sign, plain)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _lacks(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return True
    return False


def trimmed(text: str) -> str:
    """Text without blanks at the end of a line, and without empty lines at its own."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n")


def cut(line: str, most: int) -> str:
    """At most so many characters of it: its middle is left out, since tests differ at the end."""
    return line if len(line) <= most else f"{line[: most // 2]}…{line[1 - most // 2 :]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
