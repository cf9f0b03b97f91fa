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

from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.errors import PlanError
from pytest_llenergy.history.add import load_accepted_steps
from pytest_llenergy.history.change_points import MIN_SEGMENT, find_change_points, step_sizes
from pytest_llenergy.history.store import (
    Acceptance,
    Entry,
    Series,
    Store,
    group_series,
    matches_name,
    read_entries,
)
from pytest_llenergy.model.base import StoredStruct

#: Most sessions in the rolling anchor, and in the fixed one.
ROLLING_SESSIONS, FIXED_SESSIONS = 10, 5

#: Metrics to show if none is named: the first that a test has.
DEFAULT_METRICS = ("energy_per_output_token_j", "energy_j")


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


@dataclass(frozen=True)
class TrendPoint:
    """One run in a plot; ``change`` is true for the first run of a new level."""

    time: str
    commit: str | None
    value: float
    low: float | None
    high: float | None
    change: bool


def summarise_history(
    store: Store, *, test: str | None = None, metric: str | None = None, device_key: str | None = None
) -> HistoryView:
    """Compare the last run of each selected test with its anchors.

    Args:
        store: The history.
        test: Id of a test, or the part after ``::``; None for all tests.
        metric: The metric; None is the default metric of each test.
        device_key: Key of a kind of devices; None for all kinds.

    Raises:
        PlanError: If nothing is selected.
        ReportError: If a file is broken.
    """
    series = select_series(store, test=test, metric=metric, device_key=device_key)
    steps = load_accepted_steps(store)
    standings = [_standing(each, steps) for each in series]
    return HistoryView(place=store.name, standings=standings, notes=_device_change_notes(series))


def load_trends(
    store: Store, *, test: str | None = None, metric: str | None = None, device_key: str | None = None
) -> list[tuple[Series, list[TrendPoint]]]:
    """Return the runs of each selected test, oldest first, with its change points.

    A test that ran on several kinds of devices has only the runs on the latest kind. Raises the errors of
    ``summarise_history``.

    Args:
        store: The history.
        test: Id of a test, or the part after ``::``; None for all tests.
        metric: The metric; None is the default metric of each test.
        device_key: Key of a kind of devices; None for all kinds.
    """
    latest: dict[tuple[str, str], Series] = {}
    found = select_series(store, test=test, metric=metric, device_key=device_key)
    for each in sorted(found, key=lambda each: each.last.time):
        latest[each.last.id, each.last.metric] = each
    return [(each, _points(each)) for each in latest.values()]


def _points(series: Series) -> list[TrendPoint]:
    starts = set(find_change_points([entry.value for entry in series.entries]))
    return [
        TrendPoint(entry.time, entry.commit, entry.value, entry.low, entry.high, index in starts)
        for index, entry in enumerate(series.entries)
    ]


def select_series(
    store: Store, *, test: str | None, metric: str | None, device_key: str | None
) -> list[Series]:
    """Select series; without a metric, the default metric of each test.

    Args:
        store: The history.
        test: Id of a test, or the part after ``::``; None for all tests.
        metric: The metric; None is the default metric of each test.
        device_key: Key of a kind of devices; None for all kinds.
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
    commits = [entry.commit for entry in entries]
    applicable = [each for each in steps if not each.tests or last.id in each.tests]
    step = next((each for each in reversed(applicable) if each.commit in commits), None)
    start = commits.index(step.commit) if step is not None else 0
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
        better=METRICS[last.metric].better,
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
        anchor_commit=step.commit if step is not None else entries[0].commit,
        accepted=step is not None,
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
