# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``run_session``: sessions measure what ``tests.json`` of their checkout states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from pytest_llenergy.ab.session import Earlier, SessionFiles, Side
from pytest_llenergy.record.report import encode_report

from ..compare.runs import record_of, report_of, round_of

#: Factors of the joules of successive rounds.
SPREAD = (1, 1.002, 0.997, 1.001, 0.998, 1.002)


class FakeSessions:
    """Measures tests as ``{"t.py::test_a": 10.0}`` or ``{"t.py::test_a": {"joules": 10.0, FIELD: …}}`` say.

    Attributes:
        ran: Names of the sessions, in order.
        earlier: What each was told of earlier ones.
        sides: The side of each.
        happens: What happens in the session of a number instead: returns its exit code or raises.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.earlier: list[Earlier] = []
        self.happens: dict[int, Callable[[SessionFiles], int]] = {}
        self.factor: Callable[[SessionFiles], float] = lambda _: 1.0
        self.directory: Callable[[Side], Path] = lambda side: side.directory
        self.sides: list[Side] = []

    def __call__(
        self, side: Side, files: SessionFiles, rounds: int, earlier: Earlier, _: Callable[[TextIO], None]
    ) -> int:
        number = int(files.directory.name[:3])
        self.ran.append(files.directory.name)
        self.earlier.append(earlier)
        self.sides.append(side)
        files.log.write_text("collecting\nERROR: no luck\nthe end\n")
        if number in self.happens:
            return self.happens[number](files)
        place = self.directory(side) / "tests.json"
        if not place.exists():
            files.log.write_text("ERROR: file or directory not found: tests.json\n")
            return 4
        named: dict[str, Any] = json.loads(place.read_text())
        records = []
        for name, what in named.items():
            fields = dict(what) if isinstance(what, dict) else {"joules": what}
            joules = fields.pop("joules", 10.0) * self.factor(files)
            found = [
                round_of(joules * SPREAD[(number + each) % len(SPREAD)], start_s=number + each)
                for each in range(rounds)
            ]
            if name not in earlier.done:
                records.append(record_of(name, rounds=found, **fields))
        failed = any(each.status == "failed" for each in records)
        if records:
            files.report.write_bytes(encode_report(report_of(*records)))
        write_summary(files, failed=failed, measured=bool(records))
        return 0 if records else 5


def write_summary(files: SessionFiles, **changes: Any) -> None:
    summary = {"failed": False, "measured": True, "stopped": False} | changes
    files.summary.write_bytes(msgspec.json.encode(summary))
