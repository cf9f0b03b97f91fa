# SPDX-License-Identifier: Apache-2.0
"""Text for people: storable strings, short test names, suggestions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

# Text that can be stored: file names and messages may hold characters that UTF-8 has no place for.

#: For encodings that lack them: as wide as what they stand for, so that columns stay in line.
ASCII_FALLBACKS = {
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


def escape_surrogates(value: Any) -> Any:
    """The same JSON primitives with every lone surrogate written as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [escape_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {escape_surrogates(name): escape_surrogates(each) for name, each in value.items()}
    return value


def one_line(text: str) -> str:
    """Text on one line; what cannot be seen, such as marks that turn the direction of writing, is escaped."""
    return escape_invisible(" ".join(text.split()))


def escape_invisible(text: str) -> str:
    """Text with every character that cannot be seen as its escape, those between lines too."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def encodable(text: str, encoding: str) -> str:
    """Text in what the encoding has: signs of the tables in ASCII, as wide, the rest as escapes."""
    for sign, plain in ASCII_FALLBACKS.items():
        if _lacks(encoding, sign):
            text = text.replace(sign, plain)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _lacks(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return True
    return False


def strip_trailing_space(text: str) -> str:
    """Text without blanks at the end of a line, and without empty lines at its own."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n")


def shorten(line: str, most: int) -> str:
    """At most so many characters of it: its middle is left out, since tests differ at the end."""
    return line if len(line) <= most else f"{line[: most // 2]}…{line[1 - most // 2 :]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


# Names of tests that are short and still tell them apart.

#: Characters of a test's name.
MAX_NAME_LENGTH = 160


def short_test_name(name: str) -> str:
    """A test id without its directories, on one line that is not too long."""
    return shorten(one_line(split_test_id(name)[1]), MAX_NAME_LENGTH)


def unique_short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Each id without its directories; of those that would look the same, with the ones that differ.

    ``a/b/test_x.py::t`` is ``test_x.py::t``, and ``b/test_x.py::t`` where there is an ``a/c/test_x.py::t``.
    """
    alike: dict[str, dict[str, list[str]]] = {}
    for each in ids:
        path, last = split_test_id(each)
        alike.setdefault(last, {})[each] = path
    names = {}
    for last, paths in alike.items():
        common = sum(
            1 for _ in takewhile(lambda found: len(set(found)) == 1, zip(*paths.values(), strict=False))
        )
        for each, path in paths.items():
            names[each] = "/".join([*path[common:], last])
    return names


def unique_function_names(ids: Iterable[str]) -> dict[str, str]:
    """The function of each id, without parameters; of those with one name, with the class, or else the file.

    ``test_x.py::TestA::test_m`` is ``test_m``, ``TestA::test_m`` beside a ``TestB::test_m``.
    """
    plains = {each: each.partition("[")[0] for each in ids}
    left = set(plains.values())
    found: dict[str, str] = {}
    for first in (-1, 1):
        names = {plain: "::".join(plain.split("::")[first:]) or plain for plain in left}
        alike = Counter(names.values())
        found |= {plain: name for plain, name in names.items() if alike[name] == 1}
        left -= found.keys()
    found |= unique_short_ids(sorted(left))
    return {each: found[plain] for each, plain in plains.items()}


def split_test_id(name: str) -> tuple[list[str], str]:
    """The directories of an id and what follows them; a parameter may hold slashes."""
    path, bracket, params = name.partition("[")
    *directories, last = path.split("/")
    return directories, f"{last}{bracket}{params}"


# The name that was meant by one that is not known.

#: Share of letters in common (difflib's ratio) from which a name is taken for a slip of another.
MIN_SIMILARITY = 0.7


def did_you_mean(unknown: Iterable[str], known: Collection[str]) -> str:
    """A question with the known names that are closest to the unknown ones; empty where none is close."""
    close = [name for each in unknown for name in get_close_matches(each, known, n=1, cutoff=MIN_SIMILARITY)]
    return f"did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""
