# SPDX-License-Identifier: Apache-2.0
"""Report files: one run, and the paired report of ``llenergy ab``.

Files are read strictly; their JSON Schema is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.base import MALFORMED, StoredStruct, pause_garbage_collection
from pytest_llenergy.record.comparison import Baseline, ComparedReports
from pytest_llenergy.record.defaults import Inconclusive
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.record import Record, Round

#: Version 1: first published format (0.1.0).
SCHEMA_VERSION = 1

_EMPTY_RECORDS = b'"records": []'

SideName = Literal["base", "head"]


class Tool(StoredStruct, frozen=True):
    """The program that wrote the file."""

    name: str
    version: str


class RunInfo(StoredStruct, frozen=True):
    """One pytest run. Times are RFC 3339 in UTC; ``complete`` is true if no test was left out.

    A test is left out if the run ended before the test did, or if its file could not be collected.
    """

    id: str
    started_at: str
    finished_at: str | None
    complete: bool
    argv: list[str]
    exit_status: int | None


class Source(StoredStruct, frozen=True):
    """The code that was measured; None outside a git checkout."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class Report(StoredStruct, frozen=True):
    """The file that ``--energy-report`` writes. ``baseline`` is the report of ``--energy-compare``."""

    schema_version: int
    tool: Tool
    run: RunInfo
    source: Source
    environment: Environment | None
    records: list[Record]
    baseline: Baseline | None = None


Decoded = TypeVar("Decoded", bound="Report | PairedReport")


def encode_report(report: Report) -> bytes:
    """Encode a report as UTF-8 JSON, one line per record. NaN and infinity become ``null``."""
    return _encode_with_record_lines(msgspec.structs.replace(report, records=[]), report.records)


def _encode_with_record_lines(rest: StoredStruct, *records: Sequence[Record]) -> bytes:
    """Encode ``rest`` with indentation, and fill its empty lists ``records`` with one line per record.

    The file is half as large as with indentation throughout, and decodes in two thirds of the time.
    """
    text = msgspec.json.format(msgspec.json.encode(rest), indent=2)
    # The pattern cannot match inside a JSON string, where its quotes are escaped.
    first, *others = text.split(_EMPTY_RECORDS)
    parts = [first]
    for each, after in zip(records, others, strict=True):
        lines = b",\n".join(map(msgspec.json.encode, each))
        parts += [b'"records": [\n', lines, b"\n]", after] if each else [_EMPTY_RECORDS, after]
    return b"".join(parts) + b"\n"


def decode_report(data: bytes, origin: str) -> Report:
    """Decode a report strictly. ``origin`` names it in errors.

    Raises:
        ReportError: If the data is not a report of a supported version.
    """
    return _decode(Report, data, origin)


def _decode(kind: type[Decoded], data: bytes, origin: str) -> Decoded:
    """Decode strictly. Errors name a newer version, and a file with more or fewer sides, as such."""
    try:
        with pause_garbage_collection():
            found = msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise ReportError(f"{origin}: {_explain(kind, data, error)}") from None
    if (fault := _find_version_fault(found.schema_version)) is not None:
        raise ReportError(f"{origin}: {fault}")
    return found


def _explain(kind: type[Any], data: bytes, error: Exception) -> str:
    """Explain why data cannot be decoded."""
    if not data.strip():
        return "empty, expected a JSON report of pytest --energy-report"
    try:
        header = msgspec.json.decode(data, type=_Header)
    except MALFORMED as problem:
        return f"not a report of pytest --energy-report ({problem})"
    if (fault := _find_version_fault(header.schema_version)) is not None:
        return fault
    is_paired = header.compared is not msgspec.UNSET
    if is_paired and kind is not PairedReport:
        return "holds both sides of llenergy ab; one run is needed here"
    if not is_paired and kind is PairedReport:
        return "a single report; name two to compare, or a file of llenergy ab"
    return f"broken {'report of llenergy ab' if is_paired else 'report'} ({error})"


def _find_version_fault(version: int) -> str | None:
    if version > SCHEMA_VERSION:
        return (
            f"schema version {version} is newer than {SCHEMA_VERSION}, the newest this "
            "pytest-llenergy reads; upgrade pytest-llenergy"
        )
    return f"schema version {version} does not exist; versions start at 1" if version < 1 else None


class _Header(msgspec.Struct):
    schema_version: int
    compared: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a report, generated from the types that decode it."""
    return _build_schema(Report, "report")


def _build_schema(kind: type[StoredStruct], what: str) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-llenergy {what}, schema version {SCHEMA_VERSION}",
        **msgspec.json.schema(kind),
    }


# The lean view leaves out the energy of single domains, which comparisons do not need, in four fifths of the
# time. Lean records cannot be encoded again.


class _Unread(msgspec.Struct, frozen=True, gc=False):
    """Any object, without its contents."""


class _LeanRound(Round, frozen=True):
    by_domain: _Unread = _Unread()  # type: ignore[assignment]


class _LeanRecord(Record, frozen=True):
    rounds: list[_LeanRound] = []  # type: ignore[assignment]


class _LeanReport(Report, frozen=True):
    records: list[_LeanRecord]  # type: ignore[assignment]


def decode_lean_report(data: bytes, origin: str) -> Report:
    """Decode a report without the energy of single domains.

    Raises:
        ReportError: As for ``decode_report``.
    """
    return cast(Report, _decode(_LeanReport, data, origin))


class Session(StoredStruct, frozen=True):
    """One pytest run of one side. Times are RFC 3339 in UTC; a killed run has no end."""

    side: SideName
    run_id: str
    started_at: str
    finished_at: str | None
    exit_status: int | None


class PairedReport(StoredStruct, frozen=True):
    """The file that ``llenergy ab`` writes: both sides, measured alternately, and the verdicts.

    Attributes:
        schema_version: The same as that of reports.
        pairs: Pairs of rounds in each stage, such as ``6+6``.
        complete: Whether every session ended by itself.
        sessions: In the order in which they ran.
        base: One record per test, with all rounds in the order of measurement; ``head`` likewise.
        compared: What ``llenergy compare`` prints.
    """

    schema_version: int
    tool: Tool
    pairs: str
    complete: bool
    sessions: list[Session]
    base: Report
    head: Report
    compared: ComparedReports

    def with_policy(self, inconclusive: Inconclusive) -> PairedReport:
        """Return the report with how its gate treats tests that could not be judged."""
        compared = msgspec.structs.replace(self.compared, inconclusive=inconclusive)
        return msgspec.structs.replace(self, compared=compared)


def encode_paired_report(paired: PairedReport) -> bytes:
    """Encode a paired report as UTF-8 JSON, one line per record. NaN and infinity become ``null``."""
    base, head = (msgspec.structs.replace(each, records=[]) for each in (paired.base, paired.head))
    rest = msgspec.structs.replace(paired, base=base, head=head)
    return _encode_with_record_lines(rest, paired.base.records, paired.head.records)


def is_paired_report(data: bytes) -> bool:
    """Whether the data is a file of ``llenergy ab``: only these have the key ``compared``."""
    try:
        return msgspec.json.decode(data, type=_Header).compared is not msgspec.UNSET
    except MALFORMED:
        return False


def decode_paired_report(data: bytes, origin: str) -> PairedReport:
    """Decode a paired report strictly. ``origin`` names it in errors.

    Raises:
        ReportError: If the data is not a paired report of a supported version.
    """
    return _decode(PairedReport, data, origin)


def paired_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a paired report, generated from the types that decode it."""
    return _build_schema(PairedReport, "comparison of two sides")
