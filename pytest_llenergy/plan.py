# SPDX-License-Identifier: Apache-2.0
"""Marks and parameters of a test, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any

import pytest

from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.marks import MARKS

# Where the marks of a test stand: on a parameter, its function, a class, a module; the closest first.
#
# ``get_closest_marker`` takes the first mark of a node, and pytest puts a function's marks before those of
# its parameter, and those of a base class before those of the class that is derived from it.


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


# What the marks of a test say, read and checked.


def has_mark(item: pytest.Item, mark: Callable[..., Any]) -> bool:
    """Whether a test has a mark of a kind."""
    return item.get_closest_marker(mark.__name__) is not None


def read_mark(item: pytest.Item, mark: Callable[..., Any]) -> Any:
    """The closest mark of a kind as its data; ``None`` without one. Raises ``PlanError``."""
    return next(_each_level(item, mark), None)


def _parse(found: pytest.Mark, mark: Callable[..., Any]) -> Any:
    """A mark's arguments as its data. Raises ``PlanError`` that names what is wrong."""
    try:
        signature(mark).bind(*found.args, **found.kwargs)
        return mark(*found.args, **found.kwargs)
    except (TypeError, LLEnergyError) as error:
        known = ", ".join(map(_taken, signature(mark).parameters.values()))
        raise PlanError(f"@pytest.mark.{mark.__name__}: {error} (it takes: {known})") from None


def _taken(parameter: Parameter) -> str:
    """A parameter as it is given. What takes keywords of any name has none of its own."""
    any_name = parameter.kind is Parameter.VAR_KEYWORD
    return 'keyword arguments, such as dtype="float32"' if any_name else parameter.name


def check_marks(item: pytest.Item) -> None:
    """Parse every mark of ours that a test has, those that others overrule too. Raises ``PlanError``."""
    for mark in MARKS:
        for _ in _each_level(item, mark):
            pass


def _each_level(item: pytest.Item, mark: Callable[..., Any]) -> Iterator[Any]:
    """What the marks of a kind say on each level that has one, the closest first."""
    for level in levels(item):
        found = [each for each in level if each.name == mark.__name__]
        if found:
            yield _agreed(found, mark)


def _agreed(found: list[pytest.Mark], mark: Callable[..., Any]) -> Any:
    """What all marks of one level say. Which of several counts would be chance."""
    first = _parse(found[0], mark)
    for other in found[1:]:
        if _parse(other, mark) != first:
            raise PlanError(f"{_show(other)} and {_show(found[0])} stand in one place; keep one of them")
    return first


def _show(mark: pytest.Mark) -> str:
    """As it is written."""
    given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"@pytest.mark.{mark.name}({', '.join(given)})"
