# SPDX-License-Identifier: Apache-2.0
"""The journal: one line a finished test, on disk before the next one starts.

A run that is killed leaves it behind; a report that was written whole makes it superfluous. Each run has
a file of its own, so that no run touches what another has left.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import SCHEMA_VERSION, Report

SUFFIX = ".journal.jsonl"

#: How a line begins that is no record.
HEADER = b'{"schema_version"'


def journal_path(report: Path, run_id: str) -> Path:
    """Beside the report, named after it and the run."""
    return report.with_name(f"{report.stem}.{run_id}{SUFFIX}")


def left_over(report: Path) -> list[Path]:
    """Journals beside a report: those of runs that did not end, or have not yet."""
    return sorted(report.parent.glob(f"{report.stem}.*{SUFFIX}"))


class Journal:
    """Append-only file: the report without records first, then one record a line.

    Of several lines for one attempt at a test the last counts.

    Raises ``OSError`` when a line cannot be written; the lines before it stay whole.
    """

    def __init__(self, path: Path, header: Report) -> None:
        self.path = path
        # Unbuffered: what is left in a buffer on a full disk would fail again at every later call.
        self._file = path.open("ab", buffering=0)
        self._append(msgspec.json.encode(header))

    def add(self, record: Record) -> None:
        """Append a record and make sure that it is on disk."""
        self._append(msgspec.json.encode(record))

    def begin_anew(self, header: Report) -> None:
        """Say the report without records once more: the last one counts."""
        self._append(msgspec.json.encode(header))

    def _append(self, line: bytes) -> None:
        whole = self._file.tell()
        try:
            left = memoryview(line + b"\n")
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(whole)
            raise

    def close(self, *, remove: bool) -> None:
        """Close it; ``remove`` when everything in it is safe elsewhere."""
        self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


def decode_journal(data: bytes, origin: str) -> Report:
    """The report that a journal amounts to, marked incomplete.

    A last line that was cut off in the middle is left out: its test had not finished being written.
    Raises ``ReportError`` when the file is no journal.
    """
    whole = [line for line in data.split(b"\n")[:-1] if line]
    if not whole:
        raise ReportError(f"{origin}: not a journal of pytest --energy-report (no complete line)")
    try:
        header = msgspec.json.decode(whole[0], type=Report)
        records: dict[tuple[str, int], Record] = {}
        for line in whole[1:]:
            if line.startswith(HEADER):
                header = msgspec.json.decode(line, type=Report)
                continue
            record = msgspec.json.decode(line, type=Record)
            # What became of a test later counts.
            records[record.id, record.attempt] = record
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: not a journal of schema version {SCHEMA_VERSION} ({error})") from None
    return msgspec.structs.replace(header, records=list(records.values()))
