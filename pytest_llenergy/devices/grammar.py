# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``CUDA_VISIBLE_DEVICES``: a text and the names that it may hold, without a driver.

As the CUDA programming guide and torch's parser have it: an element that is negative, out of range,
ambiguous or unknown ends the list; the form of the first element (number, ``GPU-``, ``MIG-``) rules; a
device named twice leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile

BOARD_PREFIX = "GPU-"


@dataclass(frozen=True)
class Visible:
    """Full UUIDs in the order of the list, and why it gives fewer than it names, if it does."""

    uuids: tuple[str, ...]
    reason: str | None = None


def read_list(value: str, uuids: Sequence[str]) -> Visible:
    """A list of numbers, or of beginnings of UUIDs, that selects among boards in this order."""
    if value.startswith(BOARD_PREFIX):
        return by_name(value, BOARD_PREFIX, [(uuid, uuid) for uuid in uuids])
    return _by_number(value, uuids)


def by_name(value: str, prefix: str, names: Sequence[tuple[str, str]]) -> Visible:
    """A list of elements that begin with the prefix, among devices given as (name, UUID)."""
    elements = value.split(",")
    of_form = [*takewhile(lambda element: element.startswith(prefix), elements)]
    chosen: list[str] = []
    reason = None
    for element in of_form:
        matches = matching(element, names)
        if len(matches) != 1:
            has = "is the beginning of more than one" if matches else "names none that the driver shows"
            reason = f"{element!r} {has}"
            break
        chosen.append(matches[0])
    # A text repeated after the end of the list counts too.
    repeated = _repeated(of_form, of_form) or _repeated(chosen, of_form)
    if repeated is not None:
        return Visible((), _twice(repeated))
    after = elements[len(of_form) : len(of_form) + 1]
    if reason is None and after and after[0].strip():
        reason = f"{after[0]!r} does not begin with {prefix} as the first does"
    return Visible(tuple(chosen), reason)


def matching(element: str, names: Iterable[tuple[str, str]]) -> list[str]:
    """The UUIDs, given as (name, UUID), whose name this is or begins with it. Legacy MIG names are whole."""
    pairs = list(names)
    whole = [uuid for name, uuid in pairs if name == element]
    return whole or [uuid for name, uuid in pairs if "/" not in name and name.startswith(element)]


def _by_number(value: str, uuids: Sequence[str]) -> Visible:
    elements = value.split(",")
    numbers = [*takewhile(lambda number: number >= 0, map(_number, elements))]
    repeated = _repeated(numbers, elements)
    if repeated is not None:
        return Visible((), _twice(repeated))
    chosen = tuple(uuids[number] for number in takewhile(lambda number: number < len(uuids), numbers))
    return Visible(chosen, _why_ended(elements, len(numbers), len(chosen), len(uuids)))


def _why_ended(elements: Sequence[str], numbers: int, chosen: int, present: int) -> str | None:
    if chosen == len(elements):
        return None
    element = elements[chosen]
    if chosen < numbers:
        return f"{element!r} is out of range: the driver shows {present}, counted from 0"
    if not element.strip() or element.strip().startswith("-"):
        # How one says that nothing follows.
        return None
    if numbers:
        return f"{element!r} is no number as the first is"
    return f"{element!r} neither is a number nor begins with GPU- or MIG-"


def _number(element: str) -> int:
    # strtoul semantics: leading blanks and trailing text are ignored.
    number = re.match(r"\s*([+-]?[0-9]+)", element)
    return whole_number(number.group(1)) if number else -1


def whole_number(text: str) -> int:
    """Of any length: ``int`` alone refuses more than some thousand digits."""
    return int(Decimal(text))


def _repeated(values: Sequence[object], elements: Sequence[str]) -> str | None:
    for place, value in enumerate(values):
        if value in values[:place]:
            return elements[place]
    return None


def _twice(element: str) -> str:
    return f"{element!r} names what is named before it, and CUDA then shows none"
