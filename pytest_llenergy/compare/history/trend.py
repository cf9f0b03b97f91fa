# SPDX-License-Identifier: Apache-2.0
"""Trends of tests: change points, and the last run compared with two anchors.

Change points are hints for people, never a gate. The rolling anchor follows slow creep from run to run; the
fixed anchor does not, and so reveals it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pytest_llenergy.compare.history.add import load_accepted_steps
from pytest_llenergy.compare.history.change_points import (
    MIN_SEGMENT,
    find_change_points,
    find_outliers,
    step_sizes,
)
from pytest_llenergy.compare.history.store import (
    Acceptance,
    Entry,
    Series,
    Store,
    group_series,
    matches_name,
    read_entries,
)
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import StoredStruct
from pytest_llenergy.record.comparison import Verdict
from pytest_llenergy.record.quantity import shown_unit

#: Most sessions in the rolling anchor, and in the fixed one.
ROLLING_SESSIONS, FIXED_SESSIONS = 10, 5

#: Metrics to show if none is named: the first that a test has.
DEFAULT_METRICS = ("energy_per_output_token_j", "energy_j")


@dataclass(frozen=True)
class TrendPoint:
    """One run of a trend.

    Attributes:
        time: Start of the run (RFC 3339).
        value: Value in the unit of the trend, with limits ``low`` and ``high``.
        changed: Whether the level changes at this run.
        broke: Whether the devices differ from those of the previous run.
        outlier: Whether the run is far from its neighbours.
        verdict: The verdict of the run against its baseline, if it had one.
        accepted: Why the step at this run was accepted; empty if it was not.
    """

    time: str
    commit: str | None
    value: float
    low: float | None = None
    high: float | None = None
    changed: bool = False
    broke: bool = False
    outlier: bool = False
    verdict: Verdict | None = None
    accepted: str = ""


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
    """A new level from about this run on. ``size`` is relative to the level before."""

    time: str
    commit: str | None
    size: float


class Standing(StoredStruct, frozen=True):
    """One metric of one test on one kind of device.

    ``rolling`` is the median of up to ten sessions before the last, since the accepted step. ``anchor`` is
    the median of up to five sessions from that step on, or from the first session: those before the next
    change and before the last session, one at least. ``from_rolling`` and ``from_anchor`` are the relative
    differences of ``last`` from these. ``anchor_commit`` is the commit accepted last, or the first one.
    ``earlier`` counts sessions of another workload, which are left out.
    """

    id: str
    metric: str
    unit: str
    better: Literal["less", "more"]
    device_key: str
    device: str
    sessions: int
    earlier: int
    last: Entry
    rolling: float | None
    rolling_sessions: int
    from_rolling: float | None
    anchor: float
    anchor_sessions: int
    anchor_commit: str | None
    accepted: bool
    from_anchor: float | None
    changes: list[Change]


class HistoryView(StoredStruct, frozen=True):
    """The output of ``llenergy history show``."""

    place: str
    standings: list[Standing]
    notes: list[str]


def build_view(place: str, series: Sequence[Series], steps: Sequence[Acceptance]) -> HistoryView:
    """Compare the last run of each series with its anchors.

    Args:
        place: Name of the history.
        series: The series to show.
        steps: All accepted steps.
    """
    standings = [_standing(each, steps) for each in series]
    return HistoryView(place=place, standings=standings, notes=_device_change_notes(series))


def load_trends(
    store: Store, *, test: str | None = None, metric: str | None = None, device_key: str | None = None
) -> list[Trend]:
    """Return the trend of each selected test.

    A test that ran on several kinds of devices has only the runs on the latest kind. Raises the
    errors of ``select_series``.

    Args:
        store: The history.
        test: Id of a test, or the part after ``::``; None for all tests.
        metric: The metric; None is the default metric of each test.
        device_key: Key of a kind of devices; None for all kinds.
    """
    latest: dict[tuple[str, str], Series] = {}
    found = select_series(store, test=test, metric=metric, device_key=device_key)
    steps = load_accepted_steps(store)
    for each in sorted(found, key=lambda each: each.last.time):
        latest[each.last.id, each.last.metric] = each
    return [build_trend(each, steps) for each in latest.values()]


def build_trend(series: Series, steps: Sequence[Acceptance]) -> Trend:
    """Return the runs of a series with its change points, outliers and accepted steps."""
    values = [entry.value for entry in series.entries]
    starts, outliers = set(find_change_points(values)), set(find_outliers(values))
    accepted = series.find_accepted(steps)
    points = [
        TrendPoint(
            entry.time,
            entry.commit,
            entry.value,
            entry.low,
            entry.high,
            changed=place in starts,
            outlier=place in outliers,
            verdict=entry.verdict,
            accepted=accepted[place].reason if place in accepted else "",
        )
        for place, entry in enumerate(series.entries)
    ]
    return Trend(series.last.id, series.last.metric, series.last.unit, points)


def select_series(
    store: Store, *, test: str | None, metric: str | None, device_key: str | None
) -> list[Series]:
    """Select series; without a metric, the default metric of each test.

    Args:
        store: The history.
        test: Id of a test, or the part after ``::``; None for all tests.
        metric: The metric; None is the default metric of each test.
        device_key: Key of a kind of devices; None for all kinds.

    Raises:
        PlanError: If nothing is selected.
        ReportError: If a file is broken.
    """
    entries = read_entries(store)
    if not entries:
        raise PlanError(f"{store.name}: it has no session; llenergy history add REPORT adds one")
    kept = [entry for entry in entries if _is_selected(entry, test, device_key)]
    if not kept:
        named = test if test is not None else f"device {device_key}"
        raise PlanError(f"{store.name}: no session has {named}; llenergy history show lists all tests")
    if metric is None:
        usual: dict[tuple[str, str], str] = {}
        for name in reversed(DEFAULT_METRICS):
            usual |= {(entry.device_key, entry.id): name for entry in kept if entry.metric == name}
        kept = [entry for entry in kept if usual.get((entry.device_key, entry.id)) == entry.metric]
    else:
        kept = [entry for entry in kept if entry.metric == metric]
    if not kept:
        raise PlanError(f"{store.name}: no session of the selected tests has {metric or 'joules'}")
    return group_series(kept)


def _is_selected(entry: Entry, test: str | None, device_key: str | None) -> bool:
    named = test is None or matches_name(entry.id, test)
    return named and (device_key is None or entry.device_key.startswith(device_key))


def _standing(series: Series, steps: Sequence[Acceptance]) -> Standing:
    entries, last = series.entries, series.last
    accepted = series.find_accepted(steps)
    start = next(reversed(accepted), 0)
    values = [entry.value for entry in entries]
    places = find_change_points(values)
    # A change soon after the accepted step must not move the anchor.
    end = min((place for place in places if place >= start + MIN_SEGMENT), default=len(values))
    at_anchor = values[start : min(end, start + FIXED_SESSIONS, max(start + 1, len(values) - 1))]
    anchor = median(at_anchor)
    since = values[start:-1][-ROLLING_SESSIONS:]
    rolling = median(since) if since else None
    return Standing(
        id=last.id,
        metric=last.metric,
        unit=last.unit,
        better=METRICS[last.metric].better if last.metric in METRICS else last.better or "less",
        device_key=last.device_key,
        device=last.device,
        sessions=len(entries),
        earlier=series.earlier,
        last=last,
        rolling=rolling,
        rolling_sessions=len(since),
        from_rolling=_relative_change(rolling, last.value),
        anchor=anchor,
        anchor_sessions=len(at_anchor),
        anchor_commit=entries[start].commit,
        accepted=bool(accepted),
        from_anchor=_relative_change(anchor, last.value) if len(entries) > 1 else None,
        changes=[
            Change(time=entries[place].time, commit=entries[place].commit, size=size)
            for place, size in zip(places, step_sizes(values, places) if places else (), strict=True)
        ],
    )


def _relative_change(anchor: float | None, value: float) -> float | None:
    return value / anchor - 1 if anchor is not None and anchor > 0 else None


def _device_change_notes(series: Sequence[Series]) -> list[str]:
    """Note tests that ran on several kinds of devices, which are not compared with each other."""
    by_test: dict[tuple[str, str], list[Series]] = {}
    for each in series:
        by_test.setdefault((each.last.id, each.last.metric), []).append(each)
    several = {
        tuple(sorted(each.last.device_key for each in group)) for group in by_test.values() if len(group) > 1
    }
    notes = []
    for keys in sorted(several):
        last = {each.last.device_key: each.last for each in series if each.last.device_key in keys}
        devices = "; ".join(
            f"{entry.device_key} ({entry.device}) until {entry.time}"
            for entry in sorted(last.values(), key=lambda entry: entry.time)
        )
        notes.append(f"several kinds of devices, each compared only with itself: {devices}")
    return notes
