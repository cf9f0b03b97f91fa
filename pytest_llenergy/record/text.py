# SPDX-License-Identifier: Apache-2.0
"""Text for people: printable strings, short test names, suggestions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from difflib import get_close_matches
from itertools import takewhile
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


def escape_lines(text: str) -> str:
    """Escape every invisible character except line breaks."""
    return "\n".join(map(escape_invisible, text.split("\n")))


def count_tests(count: int, kind: str = "") -> str:
    """Return ``1 test`` or ``2 tests``; with the kind ``"new "`` ``2 new tests``."""
    return f"{count} {kind}test{'' if count == 1 else 's'}"


def shorten(line: str, width: int) -> str:
    """Cut a line to ``width`` characters in its middle, since names of tests differ at the end."""
    return line if len(line) <= width else f"{line[: width // 2]}…{line[1 - width // 2 :]}"


def cut_words(line: str, width: int) -> str:
    """Cut words from the middle of a line of at most ``width`` characters: its end may say what to do."""
    if len(line) <= width:
        return line
    start, end = line[: width // 2 - 1], line[2 - width // 2 :]
    return f"{start.rpartition(' ')[0] or start} … {end.partition(' ')[2] or end}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def short_test_name(name: str) -> str:
    """Return a test id without its directories, on one line of limited length."""
    return shorten(one_line(split_test_id(name)[1]), MAX_NAME_LENGTH)


def unique_short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return each id without its directories, but with those that distinguish it from another id.

    ``a/b/test_x.py::t`` becomes ``test_x.py::t``, or ``b/test_x.py::t`` next to ``a/c/test_x.py::t``.
    """
    directories: dict[str, dict[str, list[str]]] = {}
    for test_id in ids:
        path, last = split_test_id(test_id)
        directories.setdefault(last, {})[test_id] = path
    names = {}
    for last, paths in directories.items():
        levels = zip(*paths.values(), strict=False)
        common = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
        for test_id, path in paths.items():
            names[test_id] = "/".join([*path[common:], last])
    return names


def unique_function_names(ids: Iterable[str]) -> dict[str, str]:
    """Return the function of each id without parameters, with the class or file if another has the same name.

    ``test_x.py::TestA::test_m`` becomes ``test_m``, or ``TestA::test_m`` next to ``TestB::test_m``.
    """
    functions = {test_id: test_id.partition("[")[0] for test_id in ids}
    ambiguous = set(functions.values())
    names: dict[str, str] = {}
    for first in (-1, 1):
        candidates = {function: "::".join(function.split("::")[first:]) or function for function in ambiguous}
        counts = Counter(candidates.values())
        names |= {function: name for function, name in candidates.items() if counts[name] == 1}
        ambiguous -= names.keys()
    names |= unique_short_ids(sorted(ambiguous))
    return {test_id: names[function] for test_id, function in functions.items()}


def split_test_id(test_id: str) -> tuple[list[str], str]:
    """Split an id into its directories and the rest; a parameter may contain slashes."""
    path, bracket, params = test_id.partition("[")
    *directories, last = path.split("/")
    return directories, f"{last}{bracket}{params}"


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
