# SPDX-License-Identifier: Apache-2.0
"""Files of runs: a report, a lean report for comparisons, a paired report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar, cast

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.base import StoredStruct, pause_garbage_collection
from pytest_llenergy.model.comparison import Baseline, ComparedReports
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record, Round

# One run: its records, how it ended, where it ran. Strict reading, published JSON Schema.

#: 1: first published format (0.1.0).
SCHEMA_VERSION = 1

EMPTY = b'"records": []'


class Tool(StoredStruct, frozen=True):
    """Who wrote the file."""

    name: str
    version: str


class RunInfo(StoredStruct, frozen=True):
    """One pytest run. Times are RFC 3339 in UTC; ``complete`` is false unless every test had its turn."""

    id: str
    started_at: str
    finished_at: str | None
    complete: bool
    argv: list[str]
    exit_status: int | None


class Source(StoredStruct, frozen=True):
    """The code that was measured; ``None`` where there is no git checkout."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class Report(StoredStruct, frozen=True):
    """The file that ``--energy-report`` writes. ``baseline`` is what ``--energy-compare`` named."""

    schema_version: int
    tool: Tool
    run: RunInfo
    source: Source
    environment: Environment | None
    records: list[Record]
    baseline: Baseline | None = None


AReport = TypeVar("AReport", bound=Report)


def encode_report(report: Report) -> bytes:
    """The report as UTF-8 JSON, with a line for each record. NaN and infinity become ``null``."""
    return with_lines(msgspec.structs.replace(report, records=[]), report.records)


def with_lines(rest: StoredStruct, *records: Sequence[Record]) -> bytes:
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


def decode_report(data: bytes, origin: str) -> Report:
    """Read a report strictly. ``origin`` names it in the error.

    Raises ``ReportError`` for anything that is not a report of a version known here.
    """
    return decode_as(Report, data, origin)


def decode_as(kind: type[AReport], data: bytes, origin: str) -> AReport:
    """The same into a kind of report that leaves something out."""
    try:
        with pause_garbage_collection():
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


def schema_of(kind: type[StoredStruct], what: str) -> dict[str, Any]:
    """That of a file of this kind."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-llenergy {what}, schema version {SCHEMA_VERSION}",
        **msgspec.json.schema(kind),
    }


# Reports as a comparison needs them: without what it does not look at, which is half of the memory.
#
# The same fields are there and no others may be; only what is inside the left-out ones is not looked at. Such
# records are for reading alone: written, they would be broken. mypy is told to ignore each field that is left
# out: another type in the place of a field's own is the very point.


class Unread(msgspec.Struct, frozen=True, gc=False):
    """Stands for any object."""


class LeanMetric(msgspec.Struct, frozen=True, gc=False):
    """Its value alone."""

    value: float | None


class LeanRound(Round, frozen=True):
    """Without its domains."""

    by_domain: Unread = Unread()  # type: ignore[assignment]


class LeanRecord(Record, frozen=True):
    """Without how it was measured, its windows, and what was made of it before."""

    procedure: Unread | None = None  # type: ignore[assignment]
    rounds: list[LeanRound] = []  # type: ignore[assignment]
    windows: list[Unread] = []  # type: ignore[assignment]
    metrics: dict[str, LeanMetric] = {}  # type: ignore[assignment]
    power_trace: Unread | None = None  # type: ignore[assignment]
    comparisons: list[Unread] = []  # type: ignore[assignment]


class LeanReport(Report, frozen=True):
    """Of such records."""

    records: list[LeanRecord]  # type: ignore[assignment]


def decode_lean_report(data: bytes, origin: str) -> Report:
    """Read a report as strictly as ``decode`` does, but for what is left out. Raises ``ReportError``."""
    return cast(Report, decode_as(LeanReport, data, origin))


# The file that ``llenergy ab`` writes: both sides with all rounds, and what was made of them.

SideName = Literal["base", "head"]


class Session(StoredStruct, frozen=True):
    """One pytest run of one side. Times are RFC 3339 in UTC; ``None`` for one that was killed."""

    side: SideName
    run_id: str
    started_at: str
    finished_at: str | None
    exit_status: int | None


class PairedReport(StoredStruct, frozen=True):
    """Both sides of ``llenergy ab``, measured in turn: what was run, all rounds, and the verdicts.

    ``schema_version`` is that of reports, ``pairs`` the policy, such as ``6+6``. ``sessions`` are in the
    order in which they ran. ``base`` and ``head`` have one record a test, whose rounds are in that
    order too: their ``start_s`` rises within a boot of the machine. ``compared`` is what ``llenergy compare``
    prints. ``complete`` is whether every session came to its end.
    """

    schema_version: int
    tool: Tool
    pairs: str
    complete: bool
    sessions: list[Session]
    base: Report
    head: Report
    compared: ComparedReports


def encode_paired_report(paired: PairedReport) -> bytes:
    """As UTF-8 JSON, with a line for each record. NaN and infinity become ``null``."""
    base, head = (msgspec.structs.replace(each, records=[]) for each in (paired.base, paired.head))
    rest = msgspec.structs.replace(paired, base=base, head=head)
    return with_lines(rest, paired.base.records, paired.head.records)


def is_paired_report(data: bytes) -> bool:
    """Whether this is of ``llenergy ab``, by its key ``compared``, and no report of one run."""
    try:
        return msgspec.json.decode(data, type=_Kind).compared is not msgspec.UNSET
    except msgspec.DecodeError:
        return False


def decode_paired_report(data: bytes, origin: str) -> PairedReport:
    """Read such a file strictly. ``origin`` names it in the error.

    Raises ``ReportError`` for anything that is none, or is of a version not known here.
    """
    if not is_paired_report(data):
        # What is no report either is told as such.
        decode_report(data, origin)
        told = "one report has nothing to be compared with; name two, or one of llenergy ab"
        raise ReportError(f"{origin}: {told}")
    check_version(msgspec.json.decode(data, type=_Kind).schema_version, origin)
    try:
        with pause_garbage_collection():
            return msgspec.json.decode(data, type=PairedReport)
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: broken report of llenergy ab ({error})") from None


def paired_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of such a file, generated from the types that read it."""
    return schema_of(PairedReport, "comparison of two sides")


class _Kind(msgspec.Struct):
    schema_version: int
    compared: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
