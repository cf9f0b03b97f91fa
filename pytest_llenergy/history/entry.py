# SPDX-License-Identifier: Apache-2.0
"""What is kept: a line for each metric of each test of a session, one for each step that was accepted."""

from __future__ import annotations

from pytest_llenergy.model.data import Data, Kind

#: 1: first format (0.1.0).
SCHEMA_VERSION = 1

#: Of the files; others beside them are left alone.
SUFFIX = ".jsonl"


class Entry(Data, frozen=True):
    """What one session says of one metric of one test.

    ``value`` is the median of ``n`` valid rounds, ``low`` and ``high`` their quartiles (``None`` for one),
    ``noise`` their relative scatter (``None`` unless all are positive). ``time`` is when the run began, RFC
    3339 in UTC. ``device_key`` and ``workload_key`` are equal for what may be compared; ``device`` is the
    former in words.
    """

    schema_version: int
    id: str
    metric: str
    unit: str
    value: float
    low: float | None
    high: float | None
    noise: float | None
    n: int
    time: str
    commit: str | None
    branch: str | None
    dirty: bool | None
    run_id: str
    device_key: str
    device: str
    workload_key: str
    kind: Kind | None


class Acceptance(Data, frozen=True):
    """Somebody has looked at a change and takes ``commit`` for what later ones are held against.

    ``tests`` are the ids that it is accepted for; empty for all.
    """

    schema_version: int
    commit: str
    tests: list[str]
    reason: str
    time: str
