# SPDX-License-Identifier: Apache-2.0
"""Reports in files: written whole or not at all, read strictly."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.lean import decode_lean
from pytest_llenergy.model.paired import PairedReport, decode_paired, is_paired
from pytest_llenergy.model.report import Report, decode, encode
from pytest_llenergy.report.journal import SUFFIX, decode_journal
from pytest_llenergy.report.remote import fetch, is_address, shown

#: A path, or the text of an address.
Place: TypeAlias = Path | str

#: Addresses of files on this host.
LOCAL = ("file://", "local://")


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
        raise ReportError(f"{path}: could not be written ({error.strerror})") from error


def read_report(place: Place, *, lean: bool = False) -> Report:
    """A report or a journal. Raises ``ReportError`` naming the file and what is wrong with it.

    ``lean`` leaves out of a report what comparisons do not look at, see ``model.lean``.
    """
    return decode_report(read_file(place), origin(place), lean=lean)


def decode_report(data: bytes, name: str, *, lean: bool = False) -> Report:
    """What a report or a journal of this name holds. Raises ``ReportError``."""
    if name.endswith(SUFFIX):
        return decode_journal(data, name)
    return decode_lean(data, name) if lean else decode(data, name)


def read_sides(place: Place) -> PairedReport:
    """What ``llenergy ab`` wrote. Raises ``ReportError`` naming the file and what is wrong with it."""
    return decode_paired(read_file(place), origin(place))


def read_any(place: Place) -> Report | PairedReport:
    """A report, a journal, or what ``llenergy ab`` wrote. Raises ``ReportError``."""
    name, data = origin(place), read_file(place)
    if name.endswith(SUFFIX):
        return decode_journal(data, name)
    return decode_paired(data, name) if is_paired(data) else decode(data, name)


def read_file(place: Place) -> bytes:
    """A file, here or elsewhere. Raises ``ReportError``."""
    if isinstance(place, str):
        return fetch(place)
    try:
        return place.read_bytes()
    except OSError as error:
        raise ReportError(f"{place}: {error.strerror}") from None


def check_apart(output: Path, places: Iterable[Place]) -> None:
    """Raises ``ReportError`` for an output that is one of the files to read, by whatever name or link."""
    for place in places:
        if isinstance(place, str) and not place.startswith(LOCAL):
            continue
        path = Path(place.partition("://")[2]) if isinstance(place, str) else place
        try:
            same = path.samefile(output)
        except OSError:
            # One of them is not there.
            same = False
        if same:
            raise ReportError(f"{output}: the same file as {origin(place)}, which is read; name another")


def place_of(text: str) -> Place:
    """A path, or an address where it begins with a scheme."""
    return text if is_address(text) else Path(text)


def origin(place: Place) -> str:
    """How messages and reports name it."""
    return shown(place) if isinstance(place, str) else str(place)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
