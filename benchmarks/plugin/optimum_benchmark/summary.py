# SPDX-License-Identifier: Apache-2.0
"""Summarise pairs as medians and ratios, as text and as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools import OURS, PEER, Result


@dataclass(frozen=True)
class Pair:
    """Two consecutive runs of the same work."""

    repeat: int
    first: str
    ours: Result
    theirs: Result


@dataclass(frozen=True)
class Figure:
    """One row of the table: its name and the field of a result."""

    name: str
    of: Callable[[Result], float]
    digits: int


FIGURES = (
    Figure("decode, tokens/s", lambda result: result.decode_tokens_per_s, 1),
    Figure("end to end, tokens/s", lambda result: result.tokens_per_s, 1),
    Figure("process start to report on disk, s", lambda result: result.spent.report_s, 1),
    Figure("CPU time of the whole run, s", lambda result: result.spent.cpu_s, 1),
)

Key = tuple[int, str]


def group_pairs(pairs: Sequence[Pair]) -> dict[Key, list[Pair]]:
    """Group pairs by threads and the peer's launcher, in the order of their first run."""
    groups: dict[Key, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.ours.threads, str(pair.theirs.launcher)), []).append(pair)
    return groups


def summarise(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return, for each group and figure, both medians, the ratio of every pair and the median ratio."""
    rows: list[dict[str, Any]] = []
    for (threads, launcher), group in group_pairs(pairs).items():
        for figure in FIGURES:
            ratios = [figure.of(pair.ours) / figure.of(pair.theirs) for pair in group]
            rows.append(
                {
                    "threads": threads,
                    "peer_launcher": launcher,
                    "figure": figure.name,
                    OURS: median(figure.of(pair.ours) for pair in group),
                    PEER: median(figure.of(pair.theirs) for pair in group),
                    "ratios": ratios,
                    "median_ratio": median(ratios),
                }
            )
    return rows


def markdown(pairs: Sequence[Pair]) -> str:
    """Render the table. Joules have no ratio because the two tools cover different components."""
    lines = [
        f"| threads | peer's launcher | figure | {OURS} | {PEER} | {OURS} / {PEER}, pair by pair |",
        "| ---: | --- | --- | ---: | ---: | --- |",
    ]
    for (threads, launcher), group in group_pairs(pairs).items():
        for figure in FIGURES:
            ours = [figure.of(pair.ours) for pair in group]
            theirs = [figure.of(pair.theirs) for pair in group]
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            cells = [
                _format_range(ours, figure.digits),
                _format_range(theirs, figure.digits),
                f"**{median(ratios):.2f}** ({each})",
            ]
            lines.append(f"| {threads} | {launcher} | {figure.name} | " + " | ".join(cells) + " |")
        joules = [
            _format_joules([pair.ours for pair in group]),
            _format_joules([pair.theirs for pair in group]),
        ]
        lines.append(
            f"| {threads} | {launcher} | J per generate | " + " | ".join(joules) + " | not comparable |"
        )
        others = [
            _format_other_cores([pair.ours for pair in group]),
            _format_other_cores([pair.theirs for pair in group]),
        ]
        lines.append(
            f"| {threads} | {launcher} | cores used by other processes | " + " | ".join(others) + " | – |"
        )
    lines += [
        "",
        f"Medians of {max(map(len, group_pairs(pairs).values()))} run(s) of each tool, lowest and highest in "
        "brackets. Absolute numbers depend on this shared, noisy machine; only the ratios of consecutive "
        "runs are meaningful. Joules are not compared because their scopes differ (see the README).",
    ]
    return "\n".join(lines) + "\n"


def _format_range(values: Sequence[float], digits: int) -> str:
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def _format_other_cores(results: Sequence[Result]) -> str:
    return _format_range([result.spent.other_cores for result in results], 2)


def _format_joules(results: Sequence[Result]) -> str:
    known = [result.energy_j for result in results if result.energy_j is not None]
    if not known:
        return "none"
    names = results[0].energy_parts_j
    parts = {name: median(result.energy_parts_j[name] for result in results) for name in names}
    split = " + ".join(f"{name} {value:.1f}" for name, value in parts.items() if value)
    kinds = ", ".join(sorted({result.energy_kind for result in results}))
    return f"{_format_range(known, 1)} ({split}); kind: {kinds}"
