# SPDX-License-Identifier: Apache-2.0
"""Text in figures: short names of tests, and places where names cover neither data nor each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from math import dist
from typing import TYPE_CHECKING, NamedTuple

from pytest_llenergy.record.quantity import shown_unit
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import one_line, shorten, unique_function_names
from pytest_llenergy.report.html.cases import TestSection
from pytest_llenergy.report.html.svg import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Size of names in figures, and the height of their lines (CSS pixels).
FONT_SIZE, LINE_HEIGHT = 10, 13

#: Browsers may use a wider font than the one measured here.
FONT_MARGIN = 1.06

#: Radius around the centre of a mark that names keep free (CSS pixels).
MARK_RADIUS = 6

#: Distances between a mark and its name that are tried, nearest first; a line leads to a distant name.
DISTANCES, LEADER_FROM = (8, 18, 30, 44), 18

#: Of more names, each is on a line with its mark, since it would be unclear to which mark it belongs.
MAX_NEAR_NAMES = 16

#: Directions from a mark to its name, best first: the sign of each axis.
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


class Box(NamedTuple):
    """A rectangle in CSS pixels, from the lower left corner of a figure."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Whether both have an area in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def lies_in(self, other: Box) -> bool:
        """Whether the other rectangle contains this one."""
        return (
            self.left >= other.left + 2
            and self.right <= other.right
            and self.bottom >= other.bottom + 2
            and self.top <= other.top
        )


@cache
def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the width of a line of text, with a margin for other fonts (CSS pixels)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(one_line(text), FontProperties(size=size), False)
    return float(width) * FONT_MARGIN


def fit(text: str, room: float, size: float = FONT_SIZE) -> str:
    """Shorten a line of text in its middle until it is at most ``room`` wide (CSS pixels)."""
    text = one_line(text)[:400]
    count = len(text)
    while count > 3 and text_width(shorten(text, count), size) > room:
        count -= 1
    return shorten(text, count)


def axis_unit(metric: str, unit: str, prefix: str = "") -> str:
    """Return the label of an axis: the unit, or the name of a metric without one."""
    shown = shown_unit(unit)
    return f"{prefix}{shown}" if shown else metric


def place_names(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    further: Sequence[tuple[float, float]] = (),
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> int:
    """Write names next to points where they cover no point, no other name and no edge of the axes.

    Call it after the limits of the axes are set. Names that fit nowhere are left out.

    Args:
        axes: The axes of the points.
        points: Points, the most important first.
        names: A name for each point.
        further: Points without a name, which names must not cover either.
        lines: Lines from point to point, which names cover only if there is no other room.

    Returns:
        The number of names that were left out.
    """
    places = _pixels(axes, [*points, *further])
    marks = [_box_around(x, y, MARK_RADIUS) for x, y in places]
    strokes = [_box_around(x, y, 2) for line in lines for x, y in _dots(*_pixels(axes, line))]
    crowded = len(names) > MAX_NEAR_NAMES
    distances, directions = (DISTANCES[:1], DIRECTIONS[:2]) if crowded else (DISTANCES, DIRECTIONS)
    inside = Box(*axes.get_window_extent().extents)
    taken: list[Box] = []
    for (x, y), name in zip(places, names, strict=False):
        boxes = [
            (box, distance >= LEADER_FROM)
            for distance in distances
            for box in _boxes_near(x, y, text_width(name), distance, directions)
            if box.lies_in(inside) and not any(box.overlaps(each) for each in [*marks, *taken])
        ]
        if not boxes:
            continue
        free = (each for each in boxes if not any(each[0].overlaps(stroke) for stroke in strokes))
        box, is_far = next(free, boxes[0])
        taken.append(box)
        if is_far:
            nearest = min(max(x, box.left), box.right), min(max(y, box.bottom), box.top)
            colour = COLOURS["muted"]
            axes.plot(*zip((x, y), nearest, strict=True), color=colour, linewidth=0.6, transform=None)
        axes.text(box.left, box.bottom + 3, name, fontsize=FONT_SIZE, transform=None, zorder=5)
    return len(names) - len(taken)


def _pixels(axes: Axes, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in map(axes.transData.transform, points)]


def _box_around(x: float, y: float, radius: float) -> Box:
    return Box(x - radius, y - radius, x + radius, y + radius)


def _dots(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Return points on a line, a few pixels apart."""
    count = max(1, int(dist(start, end) / 4))
    return [
        (start[0] + (end[0] - start[0]) * step / count, start[1] + (end[1] - start[1]) * step / count)
        for step in range(count + 1)
    ]


def _boxes_near(
    x: float, y: float, width: float, distance: float, directions: Sequence[tuple[int, int]]
) -> Iterator[Box]:
    for across, up in directions:
        left = x - width / 2 + across * (width / 2 + distance)
        bottom = y - LINE_HEIGHT / 2 + up * (LINE_HEIGHT / 2 + distance * (0.7 if across else 1))
        yield Box(left, bottom, left + width, bottom + LINE_HEIGHT)


def name_cases(cases: Sequence[TestSection], known: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return what distinguishes each test from the others, by anchor: function, backend, parameters.

    Args:
        cases: The tests to distinguish.
        known: Facts that the figure shows in another way, such as a colour for each ``backend``.
    """
    functions = unique_function_names(case.id for case in cases)
    facts = {case.anchor: case_facts(case, functions[case.id]) for case in cases}
    varying = [name for name in varying_facts(list(facts.values())) if name not in known]
    names = {anchor: describe_facts(each, varying) for anchor, each in facts.items()}
    counts = Counter((names[anchor], *(each.get(name) for name in known)) for anchor, each in facts.items())
    if any(count > 1 for count in counts.values()) or "" in names.values():
        # The parameters of the records do not tell the tests apart, but their ids do.
        return _distinct_params(cases, functions)
    return names


def case_facts(case: TestSection, function: str) -> dict[str, str]:
    """Return function, model, backend and parameters of a test."""
    record = next(iter(case.records.values()))
    facts = {"test": function, **_backend_facts(record)}
    return facts | {name: one_line(str(value)) for name, value in record.params.items()}


def _backend_facts(record: Record) -> dict[str, str]:
    if record.backend is None:
        return {}
    return {"backend": record.backend.name, "model": record.backend.model.rstrip("/").rpartition("/")[2]}


def varying_facts(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the facts that differ between tests."""
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if len({each.get(name) for each in facts}) > 1]


def describe_facts(facts: Mapping[str, str], names: Sequence[str]) -> str:
    """Return facts as text, such as ``test_decode batch_size=8``; words need no name."""
    found = [(name, facts[name]) for name in names if name in facts]
    return " ".join(
        f"{name}={value}" if not value[:1].isalpha() or len(value) < 4 else value for name, value in found
    )


def _distinct_params(cases: Sequence[TestSection], functions: Mapping[str, str]) -> dict[str, str]:
    """Return what differs between the ids of each function, after its name if there are several."""
    several = len(set(functions.values())) > 1
    names = {}
    for function in dict.fromkeys(functions.values()):
        same = [case for case in cases if functions[case.id] == function]
        words = [one_line(case.id).partition("[")[2].removesuffix("]").split("-") for case in same]
        start = _count_common(words)
        end = _count_common([each[start:][::-1] for each in words])
        for case, each in zip(same, words, strict=True):
            params = "-".join(each[start : len(each) - end])
            names[case.anchor] = f"{function} {params}".strip() if several or not params else params
    return names


def _count_common(lists: Sequence[Sequence[str]]) -> int:
    """Return how many words all lists begin with."""
    if len(lists) < 2:
        return 0
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))
