# SPDX-License-Identifier: Apache-2.0
"""Read and write a history of runs, in a directory or remote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.base import EnergyKind, StoredStruct
from pytest_llenergy.report.remote import is_url, open_file_system, redact_url, run_with_timeout
from pytest_llenergy.report.store import replace_file

# What is kept: a line for each metric of each test of a session, one for each step that was accepted.

#: 1: first format (0.1.0).
SCHEMA_VERSION = 1

#: Of the files; others beside them are left alone.
SUFFIX = ".jsonl"


class Entry(StoredStruct, frozen=True):
    """What one session says of one metric of one test.

    ``value`` is the median of ``n`` valid rounds, ``low`` and ``high`` their quartiles (``None`` for one),
    ``noise`` their relative scatter (``None`` unless all are positive). ``time`` is when the run began, RFC
    3339 in UTC. ``device_key`` and ``workload_key`` are equal for what may be compared; ``device`` is the
    former in words.
    """

    schema_version: int
    id: str
    metric: str
    unit: str
    value: float
    low: float | None
    high: float | None
    noise: float | None
    n: int
    time: str
    commit: str | None
    branch: str | None
    dirty: bool | None
    run_id: str
    device_key: str
    device: str
    workload_key: str
    kind: EnergyKind | None


class Acceptance(StoredStruct, frozen=True):
    """Somebody has looked at a change and takes ``commit`` for what later ones are held against.

    ``tests`` are the ids that it is accepted for; empty for all.
    """

    schema_version: int
    commit: str
    tests: list[str]
    reason: str
    time: str


# Where a history is kept: a directory, or whatever fsspec reaches.
#
# A session is a file of its own, written once and never again. Nothing is read to be written, so that any
# number of machines may add at once, and a store of objects that cannot append will do.


class Store(Protocol):
    """Folders of files, one level deep."""

    name: str

    def folders(self) -> list[str]:
        """Names of all folders; empty where there is nothing yet."""

    def files(self, folder: str) -> list[str]:
        """Names of the files of a history in it, in order."""

    def read(self, folder: str, file: str) -> bytes:
        """A whole file."""

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """Write a file whole, unless there is one; whether it was written."""


def open_store(text: str) -> Store:
    """A directory, or an address. Raises ``ReportError`` for one that cannot be reached."""
    return RemoteStore(text) if is_url(text) else LocalStore(Path(text))


class LocalStore:
    """On this host. Every method raises ``ReportError``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name: str = str(root)

    def folders(self) -> list[str]:
        """As ``Place``."""
        return self._names(self._root, directories=True)

    def files(self, folder: str) -> list[str]:
        """As ``Place``."""
        return [name for name in self._names(self._root / folder, directories=False) if name.endswith(SUFFIX)]

    def read(self, folder: str, file: str) -> bytes:
        """As ``Place``."""
        path = self._root / folder / file
        try:
            return path.read_bytes()
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from None

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """As ``Place``. Two who write at once write the same, so that the last of them does no harm."""
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


class RemoteStore:
    """Behind fsspec. Every method raises ``ReportError``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.name: str = redact_url(address)
        # Some protocols connect at once.
        self._system, root = run_with_timeout(address, lambda: open_file_system(address))
        self._root = root.rstrip("/")

    def folders(self) -> list[str]:
        """As ``Place``."""
        return self._names(self._root, "directory")

    def files(self, folder: str) -> list[str]:
        """As ``Place``."""
        return [name for name in self._names(f"{self._root}/{folder}", "file") if name.endswith(SUFFIX)]

    def read(self, folder: str, file: str) -> bytes:
        """As ``Place``."""
        path = f"{self._root}/{folder}/{file}"
        return run_with_timeout(self._address, lambda: bytes(self._system.cat_file(path)))

    def create(self, folder: str, file: str, data: bytes) -> bool:
        """As ``Place``."""
        path = f"{self._root}/{folder}/{file}"

        def write() -> bool:
            if self._system.exists(path):
                return False
            self._system.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._system.pipe_file(path, data)
            return True

        return run_with_timeout(self._address, write)

    def _names(self, path: str, kind: str) -> list[str]:
        def names() -> list[str]:
            self._system.invalidate_cache()
            try:
                found = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == kind
            )

        return run_with_timeout(self._address, names)


# Reading a history: every session, and what became of each test from one to the next.

#: Folders of devices; others are left alone.
DEVICE_KEY = re.compile("[0-9a-f]{12}")


class _Versioned(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True)
class Series:
    """One metric of one test on one kind of devices, in the order of time.

    ``entries`` are of one workload, that of the last session; ``earlier`` counts those of others before it.
    """

    entries: Sequence[Entry]
    earlier: int

    @property
    def last(self) -> Entry:
        """The latest session."""
        return self.entries[-1]


def read_entries(place: Store) -> list[Entry]:
    """All lines of all sessions, in the order of time. Raises ``ReportError`` for a file that is broken."""
    found: list[Entry] = []
    for folder in place.folders():
        if DEVICE_KEY.fullmatch(folder) is None:
            continue
        for file in place.files(folder):
            found += _parse_entries(place.read(folder, file), f"{place.name}/{folder}/{file}")
    return sorted(found, key=lambda entry: (entry.time, entry.run_id))


def matches_name(test: str, name: str) -> bool:
    """Whether a test is meant: by its id, or by what follows a ``::`` of it."""
    return test == name or test.endswith(f"::{name}")


def group_series(entries: Sequence[Entry]) -> list[Series]:
    """Sorted into series, by device and then as tests first appeared."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_key, entry.id, entry.metric), []).append(entry)
    found = []
    for group in groups.values():
        same = [entry for entry in group if entry.workload_key == group[-1].workload_key]
        found.append(Series(same, len(group) - len(same)))
    return found


def _parse_entries(data: bytes, origin: str) -> list[Entry]:
    lines = data.split(b"\n")
    if lines[-1] or len(lines) == 1:
        raise ReportError(f"{origin}: broken session (its last line is not whole)")
    try:
        return [msgspec.json.decode(line, type=Entry) for line in lines[:-1]]
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: {_explain_decode_error(lines[0], error)}") from None


def _explain_decode_error(line: bytes, error: msgspec.DecodeError) -> str:
    try:
        version = msgspec.json.decode(line, type=_Versioned).schema_version
    except msgspec.DecodeError:
        return f"not a session of llenergy history ({error})"
    if version > SCHEMA_VERSION:
        return (
            f"schema version {version} is newer than {SCHEMA_VERSION}, the newest this pytest-llenergy "
            "reads; upgrade pytest-llenergy"
        )
    return f"broken session ({error})"
