# SPDX-License-Identifier: Apache-2.0
"""Latencies as medians over repeats, differences to the plugin's, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from peer_tools import OURS, Load, Sample

#: Two latencies agree within this share or this time in seconds.
AGREE_SHARE, AGREE_S = 0.02, 0.002

FIGURES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "gap", "E2E": "e2e"}
STATISTICS = ("p50", "p99", "mean")


@dataclass(frozen=True)
class Turn:
    """One run of a tool: its own figures, and those that the wire saw of the same requests."""

    tool: str
    server: str
    load: Load
    repeat: int
    sample: Sample
    wire: Sample
    load_average: float


@dataclass(frozen=True)
class Difference:
    """A tool's figure beside the plugin's in seconds: medians of all repeats.

    Attributes:
        over_wire: The plugin's figure minus what the wire saw of the same requests.
        by_turns: Difference of neighbouring runs, which contains how the server's speed has varied.
        by_wire: The same after subtracting from each figure what the wire saw of that run.
    """

    ours: float
    over_wire: float
    theirs: float
    by_turns: float
    by_wire: float

    def agrees(self, difference: float) -> bool:
        """Whether a difference is within the tolerance."""
        return abs(difference) <= max(AGREE_S, AGREE_SHARE * abs(self.ours))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation, as ``numpy.percentile`` does."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def statistic(sample: Sample, figure: str, name: str) -> float | None:
    """Return one statistic of a run, or None if the tool does not report the figure.

    All tools' percentiles come from one function, since guidellm does not interpolate.
    """
    values: list[float] | None = getattr(sample, FIGURES[figure])
    if values is None or (figure == "ITL" and name == "mean"):
        # The mean of all gaps is TPOT again.
        return None
    return fmean(values) if name == "mean" else percentile(values, float(name[1:]) / 100)


def compare(turns: Sequence[Turn], tool: str, figure: str, name: str) -> Difference | None:
    """Compare a tool with the plugin over the repeats of one load."""
    rows: list[tuple[float, ...]] = []
    ours = {turn.repeat: turn for turn in turns if turn.tool == OURS}
    for turn in turns:
        if turn.tool != tool:
            continue
        values = [
            statistic(sample, figure, name)
            for each in (ours[turn.repeat], turn)
            for sample in (each.sample, each.wire)
        ]
        if None in values:
            return None
        a, a_wire, b, b_wire = (value or 0.0 for value in values)
        rows.append((a, a - a_wire, b, b - a, (b - b_wire) - (a - a_wire)))
    return Difference(*(median(column) for column in zip(*rows, strict=True)))


def markdown(turns: Sequence[Turn], tools: Sequence[str]) -> str:
    """Render a table per server and load."""
    groups: dict[tuple[str, Load], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.server, turn.load), []).append(turn)
    return "\n".join(line for key, group in groups.items() for line in _lines(key, group, tools))


def _lines(key: tuple[str, Load], turns: Sequence[Turn], tools: Sequence[str]) -> Iterator[str]:
    server, load = key
    ours = [turn for turn in turns if turn.tool == OURS]
    peers = [tool for tool in tools if tool != OURS]
    runs = f"{len(ours)} runs of {len(ours[0].sample.ttft)} requests each"
    busy = sorted(turn.load_average for turn in turns)
    yield f"**{server}, {load.name}**: {runs}; {_joules(ours)}; load average {busy[0]:.1f}–{busy[-1]:.1f}."
    yield ""
    heads = " | ".join(f"{tool} | by the wire" for tool in peers)
    yield f"| figure, ms | {OURS} | over the wire | {heads} |"
    yield "| --- | ---: | ---: |" + " ---: | ---: |" * len(peers)
    counted: Mapping[str, list[bool]] = {"by_turns": [], "by_wire": []}
    for figure in FIGURES:
        for name in STATISTICS:
            found = [compare(turns, tool, figure, name) for tool in peers]
            known = [each for each in found if each is not None]
            if known:
                mine = f"{1e3 * known[0].ours:.1f} | {1e3 * known[0].over_wire:+.1f}"
                cells = [cell for each in found for cell in _cells(each, counted)]
                yield f"| {figure} {name} | {mine} | " + " | ".join(cells) + " |"
    yield ""
    shares = {name: f"{sum(each)} of {len(each)}" for name, each in counted.items()}
    yield (
        f"Within {AGREE_SHARE:.0%} or {1e3 * AGREE_S:g} ms: {shares['by_turns']} as measured, "
        f"{shares['by_wire']} by the wire."
    )
    yield ""


def _cells(found: Difference | None, counted: Mapping[str, list[bool]]) -> list[str]:
    if found is None:
        return ["–", "–"]
    cells = []
    for name in ("by_turns", "by_wire"):
        difference = getattr(found, name)
        counted[name].append(found.agrees(difference))
        text = f"{1e3 * difference:+.1f} ({difference / found.ours:+.1%})"
        cells.append(text if counted[name][-1] else f"**{text}**")
    return [f"{1e3 * found.theirs:.1f}, {cells[0]}", cells[1]]


def _joules(ours: Sequence[Turn]) -> str:
    joules = [turn.sample.joules for turn in ours if turn.sample.joules is not None]
    if not joules:
        return "no joules"
    kinds = "/".join(sorted({turn.sample.kind for turn in ours}))
    return f"{OURS}: {median(joules):.3f} J per output token ({kinds})"
