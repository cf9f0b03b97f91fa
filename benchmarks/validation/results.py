# SPDX-License-Identifier: Apache-2.0
"""Results of the parts as plain data: checks, tables and figures that can be read without a GPU."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_llenergy.record.base import Primitive, StoredStruct
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.report import Source

SCHEMA_VERSION = 1

#: ``failed``: a check failed or an error ended the part; ``stopped``: its time was up.
Status = Literal["passed", "failed", "skipped", "stopped"]


class Check(StoredStruct, frozen=True):
    """An expectation. ``ok`` is None if it could not be tested, for the reason in ``detail``."""

    name: str
    ok: bool | None
    detail: str = ""


class Table(StoredStruct, frozen=True):
    """A table; units are in the column titles."""

    title: str
    columns: list[str]
    rows: list[list[Primitive]]
    note: str = ""


class Line(StoredStruct, frozen=True):
    """One line of a figure. ``style`` is ``line``, ``steps`` or ``points``; ``errors`` are those of y."""

    label: str
    x: list[float]
    y: list[float]
    style: str = "line"
    errors: list[float] = []


class Figure(StoredStruct, frozen=True):
    """A plot. ``log_x`` selects a logarithmic x axis."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = False


class Part(StoredStruct, frozen=True):
    """The results of one part. ``findings`` are sentences; ``data`` holds JSON primitives for programs."""

    name: str
    status: Status
    reason: str | None
    dry: bool
    budget_s: float
    duration_s: float
    findings: list[str] = []
    checks: list[Check] = []
    tables: list[Table] = []
    figures: list[Figure] = []
    data: dict[str, Any] = {}


class Gpu(StoredStruct, frozen=True):
    """The board that was used and the values that its driver provides; None for those it does not.

    ``sources`` are the energy and power values that it can read, ``refused`` the errors of the others.
    """

    uuid: str
    name: str
    driver: str | None
    driver_cuda: str | None
    vbios: str | None
    power_limit_w: float | None
    memory_bytes: int | None
    compute_capability: str | None
    mig_enabled: bool
    persistence: bool | None
    clocks_mhz: dict[str, int]
    sources: list[str]
    refused: dict[str, str]


class Machine(StoredStruct, frozen=True):
    """The machine. ``cuda`` is the reason why torch has no CUDA; None if it has."""

    environment: Environment
    source: Source
    gpu: Gpu | None
    gpu_missing: str | None
    cuda: str | None
    versions: dict[str, str]


class Report(StoredStruct, frozen=True):
    """A whole validation. ``dry``: the parts ran without a GPU, so it validates no hardware."""

    schema_version: int
    started_at: str
    finished_at: str | None
    duration_s: float
    dry: bool
    machine: Machine
    parts: list[Part]


def encode(data: StoredStruct) -> bytes:
    """Encode as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(data), indent=1)


def decode(raw: bytes) -> Report:
    """Decode a report.

    Raises:
        msgspec.ValidationError: The content is not a report of this version.
    """
    report = msgspec.json.decode(raw, type=Report)
    if report.schema_version != SCHEMA_VERSION:
        raise msgspec.ValidationError(f"schema_version {report.schema_version}; expected {SCHEMA_VERSION}")
    return report
