# SPDX-License-Identifier: Apache-2.0
"""Names of tests that are short and still tell them apart."""

from __future__ import annotations

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


def split(name: str) -> tuple[list[str], str]:
    """The directories of an id and what follows them; a parameter may hold slashes."""
    path, bracket, params = name.partition("[")
    *directories, last = path.split("/")
    return directories, f"{last}{bracket}{params}"
