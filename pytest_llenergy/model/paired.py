# SPDX-License-Identifier: Apache-2.0
"""The file that ``llenergy ab`` writes: both sides with all rounds, and what was made of them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.comparison import ComparedReports
from pytest_llenergy.model.data import Data, without_collecting
from pytest_llenergy.model.report import Report, Tool, check_version, decode, schema_of, with_lines

SideName = Literal["base", "head"]


class Session(Data, frozen=True):
    """One pytest run of one side. Times are RFC 3339 in UTC; ``None`` for one that was killed."""

    side: SideName
    run_id: str
    started_at: str
    finished_at: str | None
    exit_status: int | None


class PairedReport(Data, frozen=True):
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


def encode_paired(paired: PairedReport) -> bytes:
    """As UTF-8 JSON, with a line for each record. NaN and infinity become ``null``."""
    base, head = (msgspec.structs.replace(each, records=[]) for each in (paired.base, paired.head))
    rest = msgspec.structs.replace(paired, base=base, head=head)
    return with_lines(rest, paired.base.records, paired.head.records)


def is_paired(data: bytes) -> bool:
    """Whether this is of ``llenergy ab``, by its key ``compared``, and no report of one run."""
    try:
        return msgspec.json.decode(data, type=_Kind).compared is not msgspec.UNSET
    except msgspec.DecodeError:
        return False


def decode_paired(data: bytes, origin: str) -> PairedReport:
    """Read such a file strictly. ``origin`` names it in the error.

    Raises ``ReportError`` for anything that is none, or is of a version not known here.
    """
    if not is_paired(data):
        # What is no report either is told as such.
        decode(data, origin)
        told = "one report has nothing to be compared with; name two, or one of llenergy ab"
        raise ReportError(f"{origin}: {told}")
    check_version(msgspec.json.decode(data, type=_Kind).schema_version, origin)
    try:
        with without_collecting():
            return msgspec.json.decode(data, type=PairedReport)
    except msgspec.DecodeError as error:
        raise ReportError(f"{origin}: broken report of llenergy ab ({error})") from None


def paired_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of such a file, generated from the types that read it."""
    return schema_of(PairedReport, "comparison of two sides")


class _Kind(msgspec.Struct):
    schema_version: int
    compared: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
