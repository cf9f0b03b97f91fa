# SPDX-License-Identifier: Apache-2.0
"""Read and write a history of runs, in a directory.

Each run has one file per kind of device, with a line for each metric of each test. Files are written once and
never changed, and adding a run reads nothing. Any number of machines may therefore add runs at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import MALFORMED, Direction, EnergyKind, Number, StoredStruct
from pytest_llenergy.record.comparison import Verdict
from pytest_llenergy.record.files import read_limited, replace_file

#: 1: first format (0.1.0).
SCHEMA_VERSION = 1

ReadableVersion = Annotated[int, msgspec.Meta(ge=1, le=SCHEMA_VERSION)]

#: Times of runs. Those of one form sort as text.
TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"

#: Suffix of the files of a history. Other files are ignored.
SUFFIX = ".jsonl"

#: Names of the folders of devices. Other folders are ignored.
DEVICE_KEY = re.compile("[0-9a-f]{12}")


class Entry(StoredStruct, frozen=True):
    """One metric of one test in one run.

    ``value`` is the median of ``n`` valid rounds, ``low`` and ``high`` are their quartiles (``None`` for one
    round), ``noise`` is their relative scatter (``None`` unless all are positive). ``time`` is the start of
    the run, RFC 3339 in UTC. Entries are comparable if ``device_key`` and ``workload_key`` are equal;
    ``device`` describes the devices. ``verdict`` is that of the run, if it was compared with a baseline.
    ``better`` is the direction of a custom metric, whose values are those of rounds or items.
    """

    schema_version: ReadableVersion
    id: str
    metric: str
    unit: str
    value: Number
    low: Number | None
    high: Number | None
    noise: Annotated[float, msgspec.Meta(ge=0, le=1e30)] | None
    n: Annotated[int, msgspec.Meta(ge=1, le=10**15)]
    time: Annotated[str, msgspec.Meta(pattern=TIME)]
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


class Acceptance(StoredStruct, frozen=True):
    """A step change that was accepted: later runs are compared with ``commit``.

    ``tests`` are the ids of the tests for which it is accepted; empty for all.
    """

    schema_version: ReadableVersion
    commit: str
    tests: list[str]
    reason: str
    time: str


class Store:
    """A history in a directory, with folders of files. Methods raise ``ReportError``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name: str = str(root)

    def folders(self) -> list[str]:
        """Return the names of all folders; none for a new history."""
        return self._names(self._root, directories=True)

    def files(self, folder: str) -> list[str]:
        """Return the sorted names of the history's files in a folder."""
        return [name for name in self._names(self._root / folder, directories=False) if name.endswith(SUFFIX)]

    def read(self, folder: str, file: str) -> bytes:
        """Return the content of a file."""
        path = self._root / folder / file
        try:
            return read_limited(path)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """Write a file unless it exists. Returns whether it was written.

        Writers of one file write the same content, so races are harmless.
        """
        path = self._root / folder / file
        try:
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None
        replace_file(path, data)
        return True

    def _names(self, path: Path, *, directories: bool) -> list[str]:
        try:
            return sorted(
                each.name
                for each in path.iterdir()
                if each.is_dir() == directories and not each.name.startswith(".")
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None


class _Versioned(msgspec.Struct):
    schema_version: int


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

    def find_accepted(self, steps: Sequence[Acceptance]) -> dict[int, Acceptance]:
        """Return the steps that apply to this test by the index of their first entry, accepted last last."""
        commits = [entry.commit for entry in self.entries]
        found: dict[int, Acceptance] = {}
        for step in steps:
            if step.commit in commits and (not step.tests or self.last.id in step.tests):
                place = commits.index(step.commit)
                found.pop(place, None)
                found[place] = step
        return found


def read_entries(place: Store) -> list[Entry]:
    """Return all entries in order of time.

    Raises:
        ReportError: If a file is broken.
    """
    found: list[Entry] = []
    for folder in place.folders():
        if DEVICE_KEY.fullmatch(folder) is None:
            continue
        for file in place.files(folder):
            found += _parse_entries(place.read(folder, file), f"{place.name}/{folder}/{file}")
    return sorted(found, key=lambda entry: (entry.time, entry.run_id))


def matches_name(test: str, name: str) -> bool:
    """Return whether ``name`` is the id of a test or the part after a ``::``."""
    return test == name or test.endswith(f"::{name}")


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


def _parse_entries(data: bytes, origin: str) -> list[Entry]:
    if not data:
        raise ReportError(f"{origin}: empty session; delete it")
    lines = data.split(b"\n")
    if lines[-1]:
        raise ReportError(f"{origin}: broken session (its last line is incomplete); delete it")
    found = []
    for line in lines[:-1]:
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except MALFORMED as error:
            raise ReportError(f"{origin}: {explain_malformed(line, error, 'session')}") from None
    return found


def explain_malformed(line: bytes, error: Exception, what: str) -> str:
    """Return why a line is no entry or acceptance that this version reads."""
    try:
        version = msgspec.json.decode(line, type=_Versioned).schema_version
    except MALFORMED:
        return f"not a {what} of llenergy history ({error})"
    if version > SCHEMA_VERSION:
        return (
            f"schema version {version} is newer than {SCHEMA_VERSION}, the newest this pytest-llenergy "
            "reads; upgrade pytest-llenergy"
        )
    return f"broken {what} ({error}); delete it"
