# SPDX-License-Identifier: Apache-2.0
"""What the parts found, as plain data: checks, tables and figures that need no GPU to be looked at."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_llenergy.model.base import Primitive, StoredStruct
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.report import Source

SCHEMA_VERSION = 1

#: ``failed``: a check does not hold, or an error ended it; ``stopped``: its time was up.
Status = Literal["passed", "failed", "skipped", "stopped"]


class Check(StoredStruct, frozen=True):
    """Something that was expected. ``ok`` is ``None`` where it could not be tried, for the reason given."""

    name: str
    ok: bool | None
    detail: str = ""


class Table(StoredStruct, frozen=True):
    """Rows for people; units are in the titles of the columns."""

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
    """One plot. ``log_x`` draws x on a logarithmic scale."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = False


class Part(StoredStruct, frozen=True):
    """One part. ``findings`` are sentences, ``data`` is what a program may want of it (JSON primitives)."""

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
    """The board that was used, and what it can be asked for. What the driver does not tell is ``None``.

    ``sources`` are the energies and powers that answer, ``refused`` what was said of the others.
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
    """Where it ran. ``cuda`` says why torch has no CUDA here; ``None`` where it has."""

    environment: Environment
    source: Source
    gpu: Gpu | None
    gpu_missing: str | None
    cuda: str | None
    versions: dict[str, str]


class Report(StoredStruct, frozen=True):
    """A whole validation. ``dry``: parts were tried without a GPU, and it validates no hardware."""

    schema_version: int
    started_at: str
    finished_at: str | None
    duration_s: float
    dry: bool
    machine: Machine
    parts: list[Part]


def encode(data: StoredStruct) -> bytes:
    """JSON for people to read too."""
    return msgspec.json.format(msgspec.json.encode(data), indent=1)


def decode(raw: bytes) -> Report:
    """Raises ``msgspec.ValidationError`` for what is no report of this version."""
    report = msgspec.json.decode(raw, type=Report)
    if report.schema_version != SCHEMA_VERSION:
        raise msgspec.ValidationError(f"schema_version {report.schema_version}; known is {SCHEMA_VERSION}")
    return report
