# SPDX-License-Identifier: Apache-2.0
"""Trends of tests: where the level changed, and the last run beside the band of its level.

Changes are hints for people, never a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pytest_llenergy.compare.history.store import Entry, Series, group_series, matches_name, read_entries
from pytest_llenergy.compare.limits import MAD_TO_SIGMA
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import Direction, StoredStruct
from pytest_llenergy.record.comparison import Verdict
from pytest_llenergy.record.quantity import shown_unit

#: A change is where the median of so many sessions is outside the band of at least so many before them, of
#: which the latest count.
NEWEST, EARLIER, LATEST = 3, 5, 20

#: Half of the band, in scaled median absolute deviations, for levels and for single sessions of one level,
#: which is at least this share of the median.
BAND_SIGMAS, OUTLIER_SIGMAS, MIN_CHANGE = 3.0, 4.0, 0.015

#: Metrics to show if none is named: the first that a test has.
DEFAULT_METRICS = ("energy_per_output_token_j", "energy_j", "duration_s")


class Band(NamedTuple):
    """Where the values of one level are expected."""

    middle: float
    half: float

    def has(self, value: float) -> bool:
        """Return whether a value is in the band."""
        return abs(value - self.middle) <= self.half


def find_band(values: Sequence[float], sigmas: float = BAND_SIGMAS) -> Band:
    """Return the band around the median of some values."""
    middle = median(values)
    deviation = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    return Band(middle, max(sigmas * deviation, MIN_CHANGE * abs(middle)))


def find_changes(values: Sequence[float]) -> list[int]:
    """Return the indices at which a new level begins."""
    found: list[int] = []
    start, place = 0, EARLIER
    while place + NEWEST <= len(values):
        band = find_band(values[max(start, place - LATEST) : place])
        if band.has(median(values[place : place + NEWEST])):
            place += 1
            continue
        while band.has(values[place]):
            place += 1
        # The change may have begun before there were enough sessions.
        while place > start + 1 and not band.has(values[place - 1]):
            place -= 1
        found.append(place)
        start, place = place, place + EARLIER
    return found


@dataclass(frozen=True)
class TrendPoint:
    """One run of a trend; an outlier is outside the band of its level."""

    time: str
    commit: str | None
    value: float
    low: float | None = None
    high: float | None = None
    changed: bool = False
    outlier: bool = False
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Trend:
    """One metric of one test over runs, oldest first."""

    id: str
    metric: str
    unit: str
    points: Sequence[TrendPoint]

    @property
    def title(self) -> str:
        """Metric and unit."""
        return ", ".join(filter(None, [self.metric, shown_unit(self.unit)]))


class Change(StoredStruct, frozen=True):
    """A new level from about this run on. ``size`` is relative to the level before; None if that is zero."""

    time: str
    commit: str | None
    size: float | None


class Standing(StoredStruct, frozen=True):
    """One metric of one test on one kind of device.

    ``usual`` is the median of the sessions before the last, up to twenty since the last change, and ``band``
    half of the range around it in which sessions are expected, relative to it. ``from_usual`` is the relative
    difference of ``last`` from it, and ``from_first`` that from the level of the first session, which shows
    what small changes add up to. ``earlier`` counts sessions of another workload, which are left out.
    """

    id: str
    metric: str
    unit: str
    better: Direction
    device_key: str
    device: str
    sessions: int
    earlier: int
    last: Entry
    usual: float | None
    band: float | None
    from_usual: float | None
    from_first: float | None
    changes: list[Change]


class HistoryView(StoredStruct, frozen=True):
    """The output of ``llenergy history show``."""

    place: str
    standings: list[Standing]


def build_view(place: str, series: Sequence[Series]) -> HistoryView:
    """Compare the last run of each series with those before it; ``place`` names the history."""
    return HistoryView(place=place, standings=[_standing(each) for each in series])


def build_trend(series: Series) -> Trend:
    """Return the runs of a series with its changes and outliers."""
    values = [entry.value for entry in series.entries]
    starts = find_changes(values)
    inside = [
        end - start < EARLIER or band.has(value)
        for start, end in pairwise([0, *starts, len(values)])
        for band in [find_band(values[start:end], OUTLIER_SIGMAS)]
        for value in values[start:end]
    ]
    points = [
        TrendPoint(
            *(each.time, each.commit, each.value, each.low, each.high),
            changed=place in starts,
            outlier=not inside[place],
            verdict=each.verdict,
        )
        for place, each in enumerate(series.entries)
    ]
    return Trend(series.last.id, series.last.metric, series.last.unit, points)


def select_series(
    root: Path, *, test: str | None, metric: str | None, device_key: str | None
) -> list[Series]:
    """Select series; without a metric, the default metric of each test."""
    entries = read_entries(root)
    if not entries:
        raise PlanError(f"{root}: it has no session; llenergy history add REPORT adds one")
    kept = [
        entry
        for entry in entries
        if (test is None or matches_name(entry.id, test)) and entry.device_key.startswith(device_key or "")
    ]
    usual: dict[tuple[str, str], str] = {}
    for name in reversed(DEFAULT_METRICS):
        usual |= {(entry.device_key, entry.id): name for entry in kept if entry.metric == name}
    kept = [entry for entry in kept if entry.metric == (metric or usual.get((entry.device_key, entry.id)))]
    if not kept:
        named = ", ".join(filter(None, (test, metric or "energy", device_key)))
        raise PlanError(f"{root}: no session has {named}; llenergy history show lists all tests")
    return group_series(kept)


def _standing(series: Series) -> Standing:
    entries, last = series.entries, series.last
    values = [entry.value for entry in entries]
    borders = [0, *find_changes(values), len(values)]
    levels = [median(values[start:end]) for start, end in pairwise(borders)]
    before = values[borders[-2] : -1][-LATEST:]
    band = find_band(before) if before else None
    same = {name: getattr(last, name) for name in ("id", "metric", "unit", "device_key", "device")}
    return Standing(
        **same,
        better=METRICS[last.metric].better if last.metric in METRICS else last.better or "less",
        sessions=len(entries),
        earlier=series.earlier,
        last=last,
        usual=band.middle if band is not None else None,
        band=band.half / band.middle if band is not None and band.middle > 0 else None,
        from_usual=_relative_change(band.middle, last.value) if band is not None else None,
        # Creep within a level may have moved its median too.
        from_first=_relative_change(median(values[: min(EARLIER, borders[1])]), last.value)
        if before
        else None,
        changes=[
            Change(time=entries[place].time, commit=entries[place].commit, size=_relative_change(*pair))
            for place, pair in zip(borders[1:-1], pairwise(levels), strict=True)
        ],
    )


def _relative_change(before: float, after: float) -> float | None:
    return after / before - 1 if before > 0 else None
