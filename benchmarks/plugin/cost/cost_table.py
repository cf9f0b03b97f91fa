# SPDX-License-Identifier: Apache-2.0
"""Render the cost of metering as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import median, stdev
from typing import Any

OURS, ZEUS, CODECARBON = "pytest-llenergy", "Zeus", "CodeCarbon"
POLLED, BUSY = "Zeus PowerMonitor, 100 ms", "Zeus PowerMonitor, default"
OURS_AT_WORK = "pytest-llenergy, in a window"
BARE = "bare loop, all boards every 100 ms"
READERS = (OURS, OURS_AT_WORK, ZEUS, POLLED, BUSY, CODECARBON, BARE)

RESAMPLES = 2000

LOOP_NAMES = {"python": "pure Python, same process", "matrices": "matrices on all cores, another process"}


def log_speed_ratios(chunks_s: Sequence[float | None]) -> list[float]:
    """Return the log of the speed of each metered span over the mean of its neighbours.

    Comparisons in which one of the three has no chunk are left out.
    """
    found = []
    for index in range(1, len(chunks_s) - 1, 2):
        before_s, with_s, after_s = chunks_s[index - 1 : index + 2]
        if before_s is not None and with_s is not None and after_s is not None:
            found.append((math.log(before_s) + math.log(after_s)) / 2 - math.log(with_s))
    return found


def speed_ratio(chunks_s: Sequence[float | None]) -> tuple[float, float]:
    """Return the speed with metering over that without, and its standard uncertainty.

    The ratio is the median over metered spans, each compared with the mean of its two neighbours, which
    removes a steady drift. Its uncertainty is the bootstrap scatter of this median, since spans disturbed by
    other processes are not normally distributed.

    Args:
        chunks_s: Seconds per chunk of spans without, with, without, ... metering; None if there was none.

    Raises:
        ValueError: Fewer than two metered spans can be compared.
    """
    differences = log_speed_ratios(chunks_s)
    if len(differences) < 2:
        raise ValueError(
            f"{len(differences)} of {len(chunks_s) // 2} metered spans can be compared, but two are needed: "
            "use more spans or a less busy machine"
        )
    random = Random(0)
    medians = [median(random.choices(differences, k=len(differences))) for _ in range(RESAMPLES)]
    ratio = math.exp(median(differences))
    return ratio, ratio * stdev(medians)


def markdown(content: Mapping[str, Any]) -> str:
    """Render the figures of all tools, then the speed of the workload."""
    rows: list[Row] = []
    if "import" in content:
        rows += _imports(content["import"])
    if "construct" in content:
        rows += _construct(content["construct"]["8"])
    if "window" in content:
        for number, by_tool in content["window"].items():
            rows += _windows(number, by_tool)
    lines = [f"| figure | {OURS} | {ZEUS} | {CODECARBON} |", "| --- | ---: | ---: | ---: |"]
    parts = ["\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])] if rows else []
    if "reader" in content:
        parts.append(_readers(content["reader"]))
    if "speed" in content:
        parts.append(_speed(content["speed"]))
    return "\n\n".join(parts) + "\n"


Row = tuple[str, str, str, str]


def _row(name: str, by_tool: Mapping[str, Any], cell: Callable[[Any], str]) -> Row:
    ours, zeus, codecarbon = (cell(by_tool[tool]) for tool in (OURS, ZEUS, CODECARBON))
    return name, ours, zeus, codecarbon


def _imports(found: Mapping[str, Any]) -> list[Row]:
    return [
        _row("import, minus a bare interpreter", found, lambda one: f"{one['over_bare_ms']:.0f} ms"),
        _row("modules after the import", found, lambda one: str(one["modules"])),
        _row("heavy modules among them", found, lambda one: ", ".join(one["heavy"]) or "none"),
    ]


def _construct(by_tool: Mapping[str, Any]) -> list[Row]:
    names = {
        "first_ms": "construct for 8 boards, first in a process",
        "again_ms": "construct for 8 boards, again",
        "ready_ms": "from first construct until a window can be opened",
    }
    return [_row(name, by_tool, _in_ms(figure)) for figure, name in names.items()]


def _in_ms(figure: str) -> Callable[[Any], str]:
    return lambda one: f"{one[figure]:.3g} ms"


def _windows(number: str, by_tool: Mapping[str, Any]) -> list[Row]:
    what = f"begin and end of a window, {number} board(s)"
    return [
        _row(f"{what}, in a loop", by_tool, lambda one: f"{one['running_us']:.3g} µs"),
        _row(f"{what}, after 3 ms of sleep", by_tool, lambda one: f"{one['rested_us']:.3g} µs"),
    ]


def _readers(by_number: Mapping[str, Any]) -> str:
    numbers = list(by_number)
    lines = [
        "| CPU time while idle | " + " | ".join(f"{n} board(s)" for n in numbers) + " | processes |",
        "| --- |" + " ---: |" * (len(numbers) + 1),
    ]
    for tool in READERS:
        cells = [f"{by_number[number][tool]['percent']:.2f} % of a core" for number in numbers]
        helpers = max(by_number[number][tool]["helper_processes"] for number in numbers)
        lines.append(f"| {tool} | " + " | ".join(cells) + f" | {1 + round(helpers)} |")
    return "\n".join(lines)


def _speed(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| loop | boards read | speed with / without metering | spans | left out |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {LOOP_NAMES[row['loop']]} | {row['boards'] or 'none (control)'} | "
        f"{row['ratio']:.4f} ± {row['u_ratio']:.4f} | {_spans(row['chunks_s'])} |"
        for row in rows
    ]
    return "\n".join(lines)


def _spans(chunks_s: Sequence[float | None]) -> str:
    compared = len(log_speed_ratios(chunks_s))
    return f"{compared} | {len(chunks_s) // 2 - compared}"
