# SPDX-License-Identifier: Apache-2.0
"""Names of tests that are short and still tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from pytest_llenergy.model.text import cut, one_line

#: Characters of a test's name.
MOST_NAME = 160


def short(name: str) -> str:
    """A test id without its directories, on one line that is not too long."""
    return cut(one_line(split(name)[1]), MOST_NAME)


def told_apart(ids: Iterable[str]) -> dict[str, str]:
    """Each id without its directories; of those that would look the same, with the ones that differ.

    ``a/b/test_x.py::t`` is ``test_x.py::t``, and ``b/test_x.py::t`` where there is an ``a/c/test_x.py::t``.
    """
    alike: dict[str, dict[str, list[str]]] = {}
    for each in ids:
        path, last = split(each)
        alike.setdefault(last, {})[each] = path
    names = {}
    for last, paths in alike.items():
        common = sum(
            1 for _ in takewhile(lambda found: len(set(found)) == 1, zip(*paths.values(), strict=False))
        )
        for each, path in paths.items():
            names[each] = "/".join([*path[common:], last])
    return names


def functions(ids: Iterable[str]) -> dict[str, str]:
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
    found |= told_apart(sorted(left))
    return {each: found[plain] for each, plain in plains.items()}


def split(name: str) -> tuple[list[str], str]:
    """The directories of an id and what follows them; a parameter may hold slashes."""
    path, bracket, params = name.partition("[")
    *directories, last = path.split("/")
    return directories, f"{last}{bracket}{params}"
