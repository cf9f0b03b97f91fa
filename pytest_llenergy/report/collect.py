# SPDX-License-Identifier: Apache-2.0
"""The run as the controller sees it: records arrive, go to the journal, and make the report."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

import pytest_llenergy
from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.comparison import Baseline
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool
from pytest_llenergy.model.text import storable
from pytest_llenergy.report.environments import differing, joined
from pytest_llenergy.report.file import write_report
from pytest_llenergy.report.journal import Journal, journal_path
from pytest_llenergy.report.provenance import environment, source
from pytest_llenergy.report.remote import without_secrets


class Collector:
    """Keeps records by (id, attempt) in order of arrival. ``path`` is where the report goes, if anywhere.

    ``copies`` are other places where it goes as well.

    ``apart`` is whether other processes run the tests, so that this one leaves the driver alone.
    """

    def __init__(
        self,
        path: Path | None,
        root: Path,
        argv: Sequence[str],
        started: datetime,
        *,
        copies: Sequence[Path] = (),
        apart: bool = False,
    ) -> None:
        self.path = path
        self._copies = tuple(copies)
        self._root = root
        self._argv: list[str] = storable(without_secrets(argv))
        self._started = started
        self._apart = apart
        self.run_id: str = f"{self._started:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._records: dict[tuple[str, int], Record] = {}
        # Under which attempt a record is kept, by who made it and what that called it.
        self._kept: dict[tuple[str, str, int], int] = {}
        # Where tests ran, by what was told of it: this process (``None``) or a worker elsewhere.
        self._places: dict[bytes | None, Environment] = {}
        self._journal: Journal | None = None
        self._source: Source | None = None
        self.problems: list[str] = []
        self.notes: list[str] = []

    @property
    def records(self) -> list[Record]:
        """Every record so far."""
        return list(self._records.values())

    def add(self, record: Record, *, worker: str = "", told: bytes | None = None) -> None:
        """Keep a record. A journal that cannot be written is a problem to report, not a reason to stop.

        ``worker`` is the one that made it; ``told`` is what that says of where it runs, if not here.
        """
        record = self._in_its_place(record, worker)
        self._records[record.id, record.attempt] = record
        moved = told not in self._places
        if moved:
            self._arrive(told)
        if self.path is None:
            return
        try:
            if self._journal is None:
                self._journal = Journal(journal_path(self.path, self.run_id), self._start())
            elif moved:
                self._journal.begin_anew(self._start())
            self._journal.add(record)
        except OSError as error:
            self.problems.append(f"journal of {self.path}: {error.strerror}; {record.id} is not in it")

    def _in_its_place(self, record: Record, worker: str) -> Record:
        """What runs again after a crash is at its next attempt; a crash keeps what was measured before."""
        told = worker, record.id, record.attempt
        attempt = self._kept.get(told)
        if attempt is not None and record.status == "crashed":
            before = self._records[record.id, attempt]
            if before.status in ("failed", "crashed"):
                return before
            reason = f"{record.reason}, after its {before.status} result"
            return msgspec.structs.replace(before, status="crashed", reason=reason)
        attempt = record.attempt
        while (known := self._records.get((record.id, attempt))) is not None and known.status == "crashed":
            attempt += 1
        self._kept[told] = attempt
        return msgspec.structs.replace(record, attempt=attempt)

    def finish(self, exit_status: int, *, complete: bool, baseline: Baseline | None = None) -> Report | None:
        """The whole report; ``None`` when nothing was measured."""
        if not self._records:
            return None
        start = self._start()
        run = RunInfo(
            id=self.run_id,
            started_at=start.run.started_at,
            finished_at=_stamp(datetime.now(timezone.utc)),
            complete=complete,
            argv=self._argv,
            exit_status=exit_status,
        )
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=start.tool,
            run=run,
            source=start.source,
            environment=start.environment,
            baseline=baseline,
            records=self.records,
        )

    def write(self, report: Report) -> bool:
        """Write the report and drop the journal; on failure keep the journal and note the problem."""
        assert self.path is not None
        kept = f"; the journal {self._journal.path} is kept: llenergy merge" if self._journal else ""
        written = True
        for path in (self.path, *self._copies):
            try:
                write_report(report, path)
            except ReportError as error:
                self.problems.append(storable(f"{error}{kept}"))
                written = False
        if self._journal is not None:
            self._journal.close(remove=written)
        return written

    def _start(self) -> Report:
        """The report before its first record, by where tests have run so far."""
        if self._source is None:
            self._source = source(self._root)
        run = RunInfo(
            id=self.run_id,
            started_at=_stamp(self._started),
            finished_at=None,
            complete=False,
            argv=self._argv,
            exit_status=None,
        )
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            run=run,
            source=self._source,
            environment=self._environment(),
            records=[],
        )

    def _arrive(self, told: bytes | None) -> None:
        """At a place where tests run."""
        if told is None:
            found = environment(apart=self._apart)
        else:
            found = msgspec.json.decode(told, type=Environment)
        self.problems += [f"environment: {reason}" for reason in found.gpus_missing]
        first = next(iter(self._places.values()), found)
        if found.key != first.key:
            self.notes.append(
                f"tests ran on different hardware ({differing(first, found)}), and a report has one: it "
                "names none, and its figures compare with no others; measure on each in a run of its own"
            )
        self._places[told] = found

    def _environment(self) -> Environment | None:
        """What all tests ran on; ``None`` where that was not one kind of machine."""
        first, *others = self._places.values()
        if not others:
            return first
        alike = all(each.key == first.key for each in others)
        return joined([first, *others]) if alike else None


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
