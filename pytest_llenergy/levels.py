# SPDX-License-Identifier: Apache-2.0
"""Where the marks of a test stand: on a parameter, its function, a class, a module; the closest first.

``get_closest_marker`` takes the first mark of a node, and pytest puts a function's marks before those of its
parameter, and those of a base class before those of the class that is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest


def levels(item: pytest.Item) -> Iterator[list[pytest.Mark]]:
    """The marks of a test by the place where they stand, from the test outwards; no list is empty.

    What ``add_marker`` has added goes after what is written on the same node, or, with ``append=False``,
    before it.
    """
    for node in reversed(item.listchain()):
        yield from _apart(node.own_markers, _written(node))


def _apart(
    marks: Sequence[pytest.Mark], written: Sequence[Sequence[pytest.Mark]]
) -> Iterator[list[pytest.Mark]]:
    places = {id(mark): place for place, level in enumerate(written) for mark in level}
    found: dict[int, list[pytest.Mark]] = {}
    added = -1
    for mark in marks:
        found.setdefault(places.get(id(mark), added), []).append(mark)
        if id(mark) in places:
            added = len(written)
    yield from (found[place] for place in sorted(found))


def _written(node: object) -> list[list[pytest.Mark]]:
    """What the source says, where that makes several levels of one node."""
    if isinstance(node, pytest.Class):
        return [_marks(vars(each).get("pytestmark", [])) for each in node.obj.__mro__]
    if not isinstance(node, pytest.Function):
        return []
    callspec = getattr(node, "callspec", None)
    return [_marks(callspec.marks if callspec else []), _marks(getattr(node.obj, "pytestmark", []))]


def _marks(given: object) -> list[pytest.Mark]:
    # ``pytestmark`` holds marks or what makes them, one or a list.
    several: list[Any] = given if isinstance(given, list) else [given]
    return [getattr(each, "mark", each) for each in several]
