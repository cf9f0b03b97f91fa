# SPDX-License-Identifier: Apache-2.0
"""Reading a history: every session, and what became of each test from one to the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.history.entry import SCHEMA_VERSION, Entry
from pytest_llenergy.history.place import Place

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


def read_entries(place: Place) -> list[Entry]:
    """All lines of all sessions, in the order of time. Raises ``ReportError`` for a file that is broken."""
    found: list[Entry] = []
    for folder in place.folders():
        if DEVICE_KEY.fullmatch(folder) is None:
            continue
        for file in place.files(folder):
            found += _lines(place.read(folder, file), f"{place.name}/{folder}/{file}")
    return sorted(found, key=lambda entry: (entry.time, entry.run_id))


def is_named(test: str, name: str) -> bool:
    """Whether a test is meant: by its id, or by what follows a ``::`` of it."""
    return test == name or test.endswith(f"::{name}")


def series_of(entries: Sequence[Entry]) -> list[Series]:
    """Sorted into series, by device and then as tests first appeared."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_key, entry.id, entry.metric), []).append(entry)
    found = []
    for group in groups.values():
        same = [entry for entry in group if entry.workload_key == group[-1].workload_key]
        found.append(Series(same, len(group) - len(same)))
    return found


def _lines(data: bytes, origin: str) -> list[Entry]:
    lines = data.split(b"\n")
    if lines[-1] or len(lines) == 1:
        raise ReportError(f"{origin}: broken session (its last line is not whole)")
    try:
        return [msgspec.json.decode(line, type=Entry) for line in lines[:-1]]
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: {_why(lines[0], error)}") from None


def _why(line: bytes, error: msgspec.DecodeError) -> str:
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
