# SPDX-License-Identifier: Apache-2.0
"""Read and write a history of runs, in a directory.

Each run has one file per kind of device, with a line for each metric of each test. Files are written once and
never changed, and adding a run reads nothing. Any number of machines may therefore add runs at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import msgspec

from pytest_llenergy.compare.comparability import describe_devices, device_facts, fingerprint, workload_key
from pytest_llenergy.compare.limits import relative_spread
from pytest_llenergy.compare.metrics import unit_of
from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import MALFORMED, Direction, EnergyKind, Number, StoredStruct
from pytest_llenergy.record.comparison import Verdict
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.metrics import ROUND_METRICS, round_values
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report

#: 1: first format (0.1.0).
SCHEMA_VERSION = 1

#: Names of the folders of devices.
DEVICE_KEY = "[0-9a-f]" * 12


class Entry(StoredStruct, frozen=True):
    """One metric of one test in one run.

    ``value`` is the median of ``n`` valid rounds, ``low`` and ``high`` are their quartiles (``None`` for one
    round), ``noise`` is their relative scatter (``None`` unless all are positive). ``time`` is the start of
    the run, RFC 3339 in UTC. Entries are comparable if ``device_key`` and ``workload_key`` are equal;
    ``device`` describes the devices. ``verdict`` is that of the run, if it was compared with a baseline.
    ``better`` is the direction of a custom metric, whose values are those of rounds or items.
    """

    schema_version: Annotated[int, msgspec.Meta(ge=1, le=SCHEMA_VERSION)]
    id: str
    metric: str
    unit: str
    value: Number
    low: Number | None
    high: Number | None
    noise: Number | None
    n: Annotated[int, msgspec.Meta(ge=1)]
    time: str
    commit: str | None
    branch: str | None
    dirty: bool | None
    run_id: str
    device_key: str
    device: str
    workload_key: str
    kind: EnergyKind | None
    verdict: Verdict | None = None
    better: Direction | None = None


@dataclass(frozen=True)
class Series:
    """One metric of one test on one kind of device, in order of time.

    ``entries`` have the workload of the last run; ``earlier`` counts entries of different workloads.
    """

    entries: Sequence[Entry]
    earlier: int

    @property
    def last(self) -> Entry:
        """The latest entry."""
        return self.entries[-1]


def read_entries(root: Path) -> list[Entry]:
    """Return all entries in order of time. Raises ``ReportError`` if a file is broken."""
    found: list[Entry] = []
    for path in sorted(root.glob(f"{DEVICE_KEY}/[!.]*.jsonl")):
        try:
            found += [msgspec.json.decode(line, type=Entry) for line in read_limited(path).splitlines()]
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None
        except MALFORMED as error:
            raise ReportError(
                f"{path}: broken, or of a newer pytest-llenergy ({error}); delete it, or upgrade"
            ) from None
    return sorted(found, key=lambda entry: (entry.time, entry.run_id))


def group_series(entries: Sequence[Entry]) -> list[Series]:
    """Group entries into series, by device and in the order in which tests first appeared."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_key, entry.id, entry.metric), []).append(entry)
    found = []
    for group in groups.values():
        same = [entry for entry in group if entry.workload_key == group[-1].workload_key]
        found.append(Series(same, len(group) - len(same)))
    return found


def matches_name(test: str, name: str) -> bool:
    """Return whether ``name`` is the id of a test or the part after a ``::``."""
    return test == name or test.endswith(f"::{name}")


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
    lines: dict[str, list[bytes]] = {}
    tests = set()
    for record in select_last_attempts(report.records, origin).values():
        for entry in _list_entries(report, record) if record.counts and record.rounds else ():
            lines.setdefault(entry.device_key, []).append(msgspec.json.encode(entry) + b"\n")
            tests.add(entry.id)
    if not lines:
        raise ReportError(f"{origin}: none of its {len(report.records)} tests was measured; nothing to add")
    stamp = re.sub("[^0-9TZ]", "", report.run.started_at)
    name = f"{stamp}-{re.sub('[^A-Za-z0-9._-]', '-', report.run.id)}.jsonl"
    # Writers of one file write the same, so races are harmless.
    new = {path: found for key, found in lines.items() if not (path := root / key / name).exists()}
    for path, found in new.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, b"".join(found))
    return len(tests) if new else None


def _list_entries(report: Report, record: Record) -> Iterator[Entry]:
    common: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": record.id,
        "time": report.run.started_at,
        "run_id": report.run.id,
        **msgspec.structs.asdict(report.source),
        "device_key": fingerprint(device_facts(record, report.environment)),
        "device": describe_devices(record, report.environment),
        "workload_key": workload_key(record),
        "kind": record.kind,
    }
    for metric in (*ROUND_METRICS, *record.custom):
        recorded = record.value_of(metric)
        if metric in ROUND_METRICS:
            values = [each.value for each in round_values(metric, record.rounds)[0]]
        else:
            values = record.custom[metric].values or ([recorded] if recorded is not None else [])
        if not values:
            continue
        quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [None, None, None]
        noisy = len(values) > 1 and min(values) > 0
        yield Entry(
            **common,
            metric=metric,
            unit=unit_of(metric, record),
            value=recorded if recorded is not None else median(values),
            low=quarters[0],
            high=quarters[2],
            noise=relative_spread(sorted(map(log, values))) if noisy else None,
            n=len(values),
            verdict=next((each.verdict for each in record.comparisons if each.metric == metric), None),
            better=record.custom[metric].better if metric in record.custom else None,
        )
