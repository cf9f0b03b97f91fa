# SPDX-License-Identifier: Apache-2.0
"""Reports on disk: written whole or not at all, read strictly, merged."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.paired import PairedReport, decode_paired
from pytest_llenergy.model.report import Report, decode, encode
from pytest_llenergy.report.journal import SUFFIX, read_journal


def write_report(report: Report, path: Path) -> None:
    """Replace ``path`` in one step. Raises ``ReportError``; what was there before is then untouched."""
    replace_file(path, encode(report))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises ``ReportError``; what was there before is then untouched."""
    try:
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(scratch).chmod(0o666 & ~_umask())
            Path(scratch).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(scratch).unlink()
            raise
    except OSError as error:
        raise ReportError(f"{path}: the report could not be written ({error.strerror})") from error


def read_report(path: Path) -> Report:
    """A report or a journal. Raises ``ReportError`` naming the file and what is wrong with it."""
    if path.name.endswith(SUFFIX):
        return read_journal(path)
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None


def read_sides(path: Path) -> PairedReport:
    """What ``llenergy ab`` wrote. Raises ``ReportError`` naming the file and what is wrong with it."""
    try:
        return decode_paired(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None


def merge(reports: Sequence[Report]) -> Report:
    """One report of several, in their order. A record that is there twice is kept once.

    Raises ``ReportError`` when they come from different hardware.
    """
    first = reports[0]
    keys = {report.environment.key for report in reports if report.environment is not None}
    if len(keys) > 1:
        raise ReportError(
            "the reports come from different hardware (environment.key differs); merge them apart"
        )
    records = list(
        {(record.id, record.attempt): record for each in reports for record in each.records}.values()
    )
    statuses = [report.run.exit_status for report in reports]
    known = [status for status in statuses if status is not None]
    run = msgspec.structs.replace(
        first.run,
        complete=all(report.run.complete for report in reports),
        exit_status=max(known) if len(known) == len(statuses) else None,
    )
    return msgspec.structs.replace(first, run=run, records=records)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
