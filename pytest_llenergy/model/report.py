# SPDX-License-Identifier: Apache-2.0
"""One run: its records, how it ended, where it ran. Strict reading, published JSON Schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.comparison import Baseline
from pytest_llenergy.model.data import Data, without_collecting
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record

#: 1: first published format (0.1.0).
SCHEMA_VERSION = 1

EMPTY = b'"records": []'


class Tool(Data, frozen=True):
    """Who wrote the file."""

    name: str
    version: str


class RunInfo(Data, frozen=True):
    """One pytest run. Times are RFC 3339 in UTC; ``complete`` is false unless every test had its turn."""

    id: str
    started_at: str
    finished_at: str | None
    complete: bool
    argv: list[str]
    exit_status: int | None


class Source(Data, frozen=True):
    """The code that was measured; ``None`` where there is no git checkout."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class Report(Data, frozen=True):
    """The file that ``--energy-report`` writes. ``baseline`` is what ``--energy-compare`` named."""

    schema_version: int
    tool: Tool
    run: RunInfo
    source: Source
    environment: Environment | None
    records: list[Record]
    baseline: Baseline | None = None


AReport = TypeVar("AReport", bound=Report)


def encode(report: Report) -> bytes:
    """The report as UTF-8 JSON, with a line for each record. NaN and infinity become ``null``."""
    return with_lines(msgspec.structs.replace(report, records=[]), report.records)


def with_lines(rest: Data, *records: Sequence[Record]) -> bytes:
    """A file that is indented but for its records, which stand in its empty lists of that name, a line each.

    It is half as large as one that is indented throughout, and read in two thirds of the time.
    """
    text = msgspec.json.format(msgspec.json.encode(rest), indent=2)
    # In a string of the file the quotes would be escaped.
    first, *others = text.split(EMPTY)
    parts = [first]
    for each, after in zip(records, others, strict=True):
        lines = b",\n".join(map(msgspec.json.encode, each))
        parts += [b'"records": [\n', lines, b"\n]", after] if each else [EMPTY, after]
    return b"".join(parts) + b"\n"


def decode(data: bytes, origin: str) -> Report:
    """Read a report strictly. ``origin`` names it in the error.

    Raises ``ReportError`` for anything that is not a report of a version known here.
    """
    return decode_as(Report, data, origin)


def decode_as(kind: type[AReport], data: bytes, origin: str) -> AReport:
    """The same into a kind of report that leaves something out."""
    try:
        with without_collecting():
            report = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        _refuse(data, origin, error)
    check_version(report.schema_version, origin)
    return report


def _refuse(data: bytes, origin: str, why: msgspec.DecodeError) -> NoReturn:
    """Say what a file is that could not be read: a report of a newer version looks broken to this one."""
    if not data.strip():
        raise ReportError(f"{origin}: empty, expected a JSON report of pytest --energy-report")
    try:
        told = msgspec.json.decode(data, type=_Versioned)
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: not a report of pytest --energy-report ({error})") from None
    check_version(told.schema_version, origin)
    if told.compared is not msgspec.UNSET:
        raise ReportError(f"{origin}: holds both sides of llenergy ab; one run is needed here")
    raise ReportError(f"{origin}: broken report ({why})")


def check_version(version: int, origin: str) -> None:
    """Raises ``ReportError`` for a version that is not known here."""
    if version > SCHEMA_VERSION:
        raise ReportError(
            f"{origin}: schema version {version} is newer than {SCHEMA_VERSION}, the newest this "
            "pytest-llenergy reads; upgrade pytest-llenergy"
        )
    if version < 1:
        raise ReportError(f"{origin}: schema version {version} never was; versions start at 1")


class _Versioned(msgspec.Struct):
    schema_version: int
    compared: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a report, generated from the types that read it."""
    return schema_of(Report, "report")


def schema_of(kind: type[Data], what: str) -> dict[str, Any]:
    """That of a file of this kind."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-llenergy {what}, schema version {SCHEMA_VERSION}",
        **msgspec.json.schema(kind),
    }
