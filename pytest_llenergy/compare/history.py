# SPDX-License-Identifier: Apache-2.0
"""A history of sessions: where each test stands, where its level changed, and how much sessions differ.

A directory has a file for each run and kind of devices, with a line for each metric of each test. Files are
written once and never changed, so that any number of machines may add runs at the same time. Changes are
hints for people, never a gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec

from pytest_llenergy.compare.comparability import (
    MeasuredRecord,
    describe_devices,
    device_facts,
    fingerprint,
    workload_key,
)
from pytest_llenergy.compare.limits import MAD_TO_SIGMA, relative_spread
from pytest_llenergy.compare.metrics import METRICS, unit_of
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.compare.rule import NEEDS_SESSIONS, Rule
from pytest_llenergy.compare.statistics import SESSION_SPREAD, Design, Estimate, Sample, compare_samples
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.record.base import MALFORMED, Number, StoredStruct
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report

#: 1: first format (0.1.0).
SCHEMA_VERSION = 1

#: Names of the folders of devices.
DEVICE_KEY = "[0-9a-f]" * 12

#: A change is where the median of so many sessions is outside the band of at least so many before them, of
#: which the latest count.
NEWEST, EARLIER, LATEST = 3, 5, 20

#: Half of the band in scaled median absolute deviations; it is at least this share of the median.
BAND_SIGMAS, MIN_CHANGE = 3.0, 0.015

#: Fewest sessions that tell how much sessions differ, and the least that they may tell: few may agree by
#: chance.
MIN_SESSIONS, MIN_SPREAD = EARLIER + NEWEST, 0.003

#: Metrics to show if none is named: the first that a test has.
DEFAULT_METRICS = ("energy_per_output_token_j", "energy_j", "duration_s")


class Entry(StoredStruct, frozen=True):
    """One metric of one test in one run: ``value`` is the median of its rounds.

    ``time`` is the start of the run, RFC 3339 in UTC. Entries are comparable if ``device_key`` and
    ``workload_key`` are equal; ``device`` describes the devices.
    """

    schema_version: Annotated[int, msgspec.Meta(ge=1, le=SCHEMA_VERSION)]
    id: str
    metric: str
    unit: str
    value: Number
    time: str
    commit: str | None
    run_id: str
    device_key: str
    device: str
    workload_key: str


#: One metric of one test on one kind of device, in order of time; all of the workload of the last run.
Series = Sequence[Entry]


class Level(NamedTuple):
    """Sessions from ``start`` to before ``end``, and the band in which those of their level are expected."""

    start: int
    end: int
    middle: float
    half: float


class Change(StoredStruct, frozen=True):
    """A new level from about this run on. ``size`` is relative to the level before; None if that is zero."""

    time: str
    commit: str | None
    size: float | None


class Standing(StoredStruct, frozen=True):
    """One metric of one test on one kind of device.

    ``usual`` is the median of the sessions before the last, up to twenty since the last change, and ``band``
    half of the range around it in which sessions are expected, relative to it. ``from_usual`` is the relative
    difference of ``last`` from it, and ``from_first`` that from the first sessions, which shows what small
    changes add up to.
    """

    id: str
    metric: str
    unit: str
    device_key: str
    device: str
    sessions: int
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


def add_run(report: Report, origin: str, root: Path, *, allow_dirty: bool = False) -> int | None:
    """Add the measurements of a run, by kind of device. Adding a run again changes nothing.

    Returns:
        The number of tests added; None for a run that was added before.
    """
    source = report.source
    if not report.run.complete:
        raise ReportError(f"{origin}: the run did not finish; a history has only complete runs")
    if not allow_dirty and (source.commit is None or source.dirty is not False):
        state = f"commit {source.commit[:10]} has uncommitted changes" if source.commit else "unknown commit"
        raise ReportError(f"{origin}: {state}; --allow-dirty adds the run anyway")
    entries = [
        entry
        for record in select_last_attempts(report.records, origin).values()
        if record.counts and record.rounds
        for entry in _list_entries(report, record)
    ]
    if not entries:
        raise ReportError(f"{origin}: none of its {len(report.records)} tests was measured; nothing to add")
    stamp = re.sub("[^0-9TZ]", "", report.run.started_at)
    name = f"{stamp}-{re.sub('[^A-Za-z0-9._-]', '-', report.run.id)}.jsonl"
    added = False
    for key in {entry.device_key for entry in entries}:
        path = root / key / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (msgspec.json.encode(entry) + b"\n" for entry in entries if entry.device_key == key)
            replace_file(path, b"".join(lines))
            added = True
    return len({entry.id for entry in entries}) if added else None


def _list_entries(report: Report, record: Record) -> Iterator[Entry]:
    common: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": record.id,
        "time": report.run.started_at,
        "run_id": report.run.id,
        "commit": report.source.commit,
        "device_key": fingerprint(device_facts(record, report.environment)),
        "device": describe_devices(record, report.environment),
        "workload_key": workload_key(record),
    }
    for metric in (*ROUND_METRICS, *record.custom):
        if (value := record.value_of(metric)) is not None:
            yield Entry(**common, metric=metric, unit=unit_of(metric, record), value=value)


def read_entries(root: Path) -> list[Entry]:
    """Return all entries in order of time. Raises ``ReportError`` if a file is broken."""
    found: list[Entry] = []
    for path in sorted(root.glob(f"{DEVICE_KEY}/[!.]*.jsonl")):
        try:
            found += [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
        except (OSError, *MALFORMED) as error:
            raise ReportError(
                f"{path}: broken, or of a newer pytest-llenergy ({error}); delete it, or upgrade"
            ) from None
    return sorted(found, key=lambda entry: (entry.time, entry.run_id))


def group_series(entries: Iterable[Entry]) -> list[Series]:
    """Group entries into series, by device and in the order in which tests first appeared."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_key, entry.id, entry.metric), []).append(entry)
    return [
        [each for each in group if each.workload_key == group[-1].workload_key] for group in groups.values()
    ]


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
        if (test is None or entry.id == test or entry.id.endswith(f"::{test}"))
        and entry.device_key.startswith(device_key or "")
    ]
    usual: dict[tuple[str, str], str] = {}
    for name in reversed(DEFAULT_METRICS):
        usual |= {(entry.device_key, entry.id): name for entry in kept if entry.metric == name}
    kept = [entry for entry in kept if entry.metric == (metric or usual.get((entry.device_key, entry.id)))]
    if not kept:
        named = ", ".join(filter(None, (test, metric or "energy", device_key)))
        raise PlanError(f"{root}: no session has {named}; llenergy history show lists all tests")
    return group_series(kept)


def find_levels(values: Sequence[float]) -> list[Level]:
    """Divide sessions where their level changed."""
    starts, place = [0], EARLIER
    while place + NEWEST <= len(values):
        middle, half = _find_band(values[max(starts[-1], place - LATEST) : place])
        if abs(median(values[place : place + NEWEST]) - middle) <= half:
            place += 1
            continue
        while abs(values[place] - middle) <= half:
            place += 1
        # The change may have begun before there were enough sessions.
        while place > starts[-1] + 1 and abs(values[place - 1] - middle) > half:
            place -= 1
        starts.append(place)
        place += EARLIER
    borders = [*starts, len(values)] if values else []
    return [Level(start, end, *_find_band(values[start:end])) for start, end in pairwise(borders)]


def _find_band(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values, and half of the band around it."""
    middle = median(values)
    deviation = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    return middle, max(BAND_SIGMAS * deviation, MIN_CHANGE * abs(middle))


def build_view(place: str, series: Sequence[Series]) -> HistoryView:
    """Compare the last run of each series with those before it; ``place`` names the history."""
    return HistoryView(place=place, standings=[_stand(each) for each in series])


def _stand(series: Series) -> Standing:
    last, values = series[-1], [entry.value for entry in series]
    levels = find_levels(values)
    before = values[levels[-1].start : -1][-LATEST:]
    usual, half = _find_band(before) if before else (None, 0.0)
    # Creep within a level may have moved its median too.
    first = median(values[: min(EARLIER, levels[0].end)]) if before else None
    return Standing(
        **{name: getattr(last, name) for name in ("id", "metric", "unit", "device_key", "device")},
        sessions=len(series),
        last=last,
        usual=usual,
        band=half / usual if usual is not None and usual > 0 else None,
        from_usual=_relative_change(usual, last.value),
        from_first=_relative_change(first, last.value),
        changes=[
            Change(
                time=series[after.start].time,
                commit=series[after.start].commit,
                size=_relative_change(earlier.middle, after.middle),
            )
            for earlier, after in pairwise(levels)
        ],
    )


def _relative_change(before: float | None, after: float) -> float | None:
    return after / before - 1 if before is not None and before > 0 else None


class StoredEstimator:
    """Compares with a stored baseline: the limits allow for what sessions of the same code differ by.

    That is the spread of the test in the history, or else the typical one of the history, or else
    ``SESSION_SPREAD``, unless nothing ``assumes`` it.
    """

    def __init__(self, root: Path, *, assumes: bool = True) -> None:
        self._root = root
        self._assumes = assumes
        self._spreads: dict[tuple[str, str], dict[str, float]] = {}

    @cached_property
    def _entries(self) -> list[Entry]:
        return read_entries(self._root)

    def __call__(self, head: MeasuredRecord, base: Sample, new: Sample, rule: Rule, metric: str) -> Estimate:
        """Decide on all rounds of both sessions."""
        known = self._find_spread(head, metric) if self._entries else None
        spread = SESSION_SPREAD if known is None else known
        estimate = compare_samples(base, new, rule, METRICS[metric].better, Design(session_spread=spread))
        if known is None and not self._assumes and estimate.low is not None:
            reason = f"{NEEDS_SESSIONS}: one session a side does not show how much sessions differ"
            return estimate.changed_to("inconclusive", reason)
        return estimate

    def _find_spread(self, head: MeasuredRecord, metric: str) -> float | None:
        key = metric, fingerprint(device_facts(head.record, head.environment))
        if key not in self._spreads:
            self._spreads[key] = find_spreads(
                each for each in self._entries if (each.metric, each.device_key) == key
            )
        spreads = self._spreads[key]
        return spreads.get(head.record.id, median(spreads.values())) if spreads else None


def find_spreads(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the standard deviation of the level between sessions, of each test that has enough of them.

    Changes of level do not count. The noise of the rounds does: it is part of what sessions differ by.
    """
    found = {}
    for series in group_series(entries):
        values = [entry.value for entry in series]
        if len(values) >= MIN_SESSIONS and min(values) > 0:
            rest = [
                log(value / level.middle)
                for level in find_levels(values)
                for value in values[level.start : level.end]
            ]
            found[series[-1].id] = max(MIN_SPREAD, relative_spread(rest))
    return found
