# SPDX-License-Identifier: Apache-2.0
"""Read and write report files, and the journal of a run.

The journal has one line per finished test, which is on disk before the next test starts. A killed run leaves
it behind; a complete report replaces it. Each run has a separate journal, so that runs do not touch each
other's files.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from secrets import token_hex

import msgspec

from pytest_llenergy.compare.timings import decode_timings, is_timings, join_sessions
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import MALFORMED
from pytest_llenergy.record.comparison import ComparedReports
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import (
    SCHEMA_VERSION,
    PairedReport,
    Report,
    decode_lean_report,
    decode_paired_report,
    decode_report,
    encode_report,
    is_paired_report,
)

JOURNAL_SUFFIX = ".journal.jsonl"

#: Minimum time between two syncs of a journal to disk (seconds): each can take longer than a short test.
SYNC_EVERY_S = 1.0

#: Beginning of a journal line that is a report without records.
_REPORT = b'{"schema_version"'

#: A record is kept while the files of its test may be fake ones, which replace names, but no ``partial``.
_open, _write, _truncate = partial(os.open), partial(os.write), partial(os.ftruncate)
_fstat, _fsync = partial(os.fstat), partial(os.fsync)


def journal_path(report: Path, run_id: str) -> Path:
    """Return the journal next to a report, named after the report and the run."""
    return report.with_name(f"{report.stem}.{run_id}{JOURNAL_SUFFIX}")


def find_journals(report: Path) -> list[Path]:
    """Find the journals next to a report: those of runs that were killed or are still running."""
    return sorted(report.parent.glob(f"{escape(report.stem)}.*{JOURNAL_SUFFIX}"))


class Journal:
    """Append-only file, a line each: records, and reports without records, of which the last counts.

    If an attempt at a test has several lines, the last one counts. If a line cannot be written, ``add``
    raises ``OSError``, and the lines before it stay intact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered, since data left in a buffer on a full disk would fail every later write.
        self._descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._synced_s = -math.inf

    def add(self, part: Report | Record) -> None:
        """Append a line, which outlives this process; sync it to disk if the last sync is a while ago."""
        # Not ``tell``, which stays where it was when a failed line is cut off.
        end = _fstat(self._descriptor).st_size
        try:
            rest = memoryview(msgspec.json.encode(part) + b"\n")
            while rest:
                rest = rest[_write(self._descriptor, rest) :]
            if time.monotonic() >= self._synced_s + SYNC_EVERY_S:
                _fsync(self._descriptor)
                self._synced_s = time.monotonic()
        except OSError:
            _truncate(self._descriptor, end)
            raise

    def close(self, *, remove: bool) -> None:
        """Close the file, and ``remove`` it once its contents are in a report."""
        os.close(self._descriptor)
        if remove:
            self.path.unlink(missing_ok=True)


def _decode_journal(data: bytes, origin: str) -> Report:
    """Return the records of a journal as an incomplete report; a truncated last line is dropped."""
    report: Report | None = None
    records: dict[tuple[str, int], Record] = {}
    try:
        for line in filter(None, data.split(b"\n")[:-1]):
            if report is None or line.startswith(_REPORT):
                report = msgspec.json.decode(line, type=Report)
            else:
                record = msgspec.json.decode(line, type=Record)
                records[record.id, record.attempt] = record
    except MALFORMED as error:
        raise ReportError(f"{origin}: not a journal of schema version {SCHEMA_VERSION} ({error})") from None
    if report is None:
        raise ReportError(f"{origin}: not a journal of pytest --energy-report (no complete line)")
    return msgspec.structs.replace(report, records=list(records.values()))


def check_creatable(path: Path) -> None:
    """Check that a run can write a file and its journal, or raise ``OSError``."""
    # Longer than what journals and scratch files add.
    probe = path.with_name(f".{path.name}-{token_hex(20)}")
    probe.touch(exist_ok=False)
    probe.unlink()


def write_report(report: Report, path: Path) -> None:
    """Replace a report atomically, or raise ``ReportError``; the old file then remains."""
    replace_file(path, encode_report(report))


def read_report(path: Path, *, lean: bool = False) -> Report:
    """Read a report, a journal or the JSON of pytest-benchmark, of which a folder has one file a session.

    ``lean`` leaves out what comparisons do not need, see ``record.report.decode_lean_report``.
    """
    # Unlike Path.is_dir, False for a name that is too long, which read_file reports.
    if os.path.isdir(path):  # noqa: PTH112
        files = [(str(each), read_file(each)) for each in sorted(path.glob("*.json"))]
        if not files or not all(is_timings(data) for _, data in files):
            raise ReportError(f"{path}: a folder, which must hold only sessions of pytest-benchmark as JSON")
        return join_sessions(files)
    return decode_report_or_journal(read_file(path), str(path), lean=lean)


def decode_report_or_journal(data: bytes, name: str, *, lean: bool = False) -> Report:
    """Decode a journal if ``name`` has its suffix, else a report, or raise ``ReportError``."""
    if name.endswith(JOURNAL_SUFFIX):
        return _decode_journal(data, name)
    if is_timings(data):
        return decode_timings(data, name)
    return decode_lean_report(data, name) if lean else decode_report(data, name)


def read_paired_report(path: Path) -> PairedReport:
    """Read a file of ``llenergy ab``, or raise ``ReportError``."""
    return decode_paired_report(read_file(path), str(path))


def read_comparison(path: Path) -> PairedReport | ComparedReports:
    """Read a file of ``llenergy ab``, or JSON of ``llenergy compare``, or raise ``ReportError``."""
    data = read_file(path)
    try:
        return msgspec.json.decode(data, type=ComparedReports)
    except MALFORMED:
        return decode_paired_report(data, str(path))


def read_report_or_paired(path: Path) -> Report | PairedReport:
    """Read a report, a journal, or a file of ``llenergy ab``, or raise ``ReportError``."""
    name, data = str(path), read_file(path)
    if is_paired_report(data):
        return decode_paired_report(data, name)
    return decode_report_or_journal(data, name)


def read_file(path: Path) -> bytes:
    """Read a file, or raise ``ReportError``."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None


def check_not_overwritten(output: Path, inputs: Iterable[Path]) -> None:
    """Raise ``ReportError`` if the output is one of the files to read, even under another name or link."""
    for path in inputs:
        with suppress(OSError):  # one of the files does not exist
            if path.samefile(output):
                raise ReportError(f"{output}: the same file as the input {path}; choose another output")
