# SPDX-License-Identifier: Apache-2.0
"""ReportBuilder: collect the records of a run, append each to the journal, and write the report."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import Baseline
from pytest_llenergy.record.environment import Environment
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool, encode_report
from pytest_llenergy.record.text import escape_surrogates, format_time
from pytest_llenergy.report.provenance import collect_source
from pytest_llenergy.report.store import Journal, journal_path


class ReportBuilder:
    """Keeps records by (id, attempt) in order of arrival.

    Args:
        paths: Files for the report; the journal lies beside the first. Without any, records are kept in
            memory only.
        root: Root directory of the run, whose repository is the source.
        argv: The plugin's options on the command line.
        started: When the run began.

    Attributes:
        problems: Errors to show, such as files that could not be written.
        warnings: Lines to show that fail no run.
        written: Files that have the report.
    """

    def __init__(self, paths: Sequence[Path], root: Path, argv: Sequence[str], started: datetime) -> None:
        self.paths = list(paths)
        self._root = root
        self._argv: list[str] = escape_surrogates(list(argv))
        self._started = started
        self.run_id: str = f"{self._started:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._records: dict[tuple[str, int], Record] = {}
        self._environment: Environment | None = None
        # Hosts of a cluster by name.
        self._hosts: dict[str, Environment] = {}
        self._journal: Journal | None = None
        self._journal_is_short = False
        self._source: Source | None = None
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.written: list[Path] = []

    @property
    def records(self) -> list[Record]:
        """Every record so far."""
        return list(self._records.values())

    def add(self, record: Record, hosts: Mapping[str, Environment] | None = None) -> None:
        """Keep a record and append it to the journal. A failure of the journal becomes a problem.

        What may take long is left to ``describe_run``, so that callers can hold off Ctrl-C.

        Args:
            record: The record of one attempt of a test.
            hosts: The hosts of a cluster on which the test ran, by name.
        """
        new = {name: host for name, host in (hosts or {}).items() if name not in self._hosts}
        self._hosts |= new
        self.problems += [
            f"environment: {name}: {reason}" for name, host in new.items() for reason in host.gpus_missing
        ]
        record = self._with_attempt(record)
        self._records[record.id, record.attempt] = record
        self._append(record, f"{record.id} is not in it")
        if new:
            self._append(self._build_start(), "it does not name the hosts")

    def _append(self, part: Record | Report, without: str) -> None:
        if not self.paths:
            return
        try:
            if self._journal is None:
                self._journal = Journal(journal_path(self.paths[0], self.run_id))
                self._journal.add(self._build_start())
            self._journal.add(part)
        except OSError as error:
            self._journal_is_short = True
            self.problems.append(f"journal of {self.paths[0]}: {error.strerror}; {without}")

    def describe_run(self) -> None:
        """Find the commit and the environment, if they are not known yet, also for the journal.

        Queries git and the GPU driver, which may take long. Ctrl-C may end it; a later call continues.
        """
        if self._source is not None:
            return
        if self._environment is None:
            self._environment = collect_environment()
            self.problems += [f"environment: {reason}" for reason in self._environment.gpus_missing]
        self._source = collect_source(self._root)
        if self._journal is not None:
            self._append(self._build_start(), "it does not name the machine")

    def _with_attempt(self, record: Record) -> Record:
        """Number a test that is rerun after a crash as the next attempt.

        A crash after the test's record has arrived, such as in teardown, keeps the measurement.
        """
        attempt = record.attempt
        while (before := self._records.get((record.id, attempt))) and before.status == "crashed":
            attempt += 1
        if before is None or record.status != "crashed":
            return msgspec.structs.replace(record, attempt=attempt)
        if before.status == "failed":
            return before
        reason = f"{record.reason}, after its {before.status} result"
        return msgspec.structs.replace(before, status="crashed", reason=reason)

    def build(self, exit_status: int, *, complete: bool, baseline: Baseline | None = None) -> Report:
        """Build the report. It lacks commit and environment if ``describe_run`` did not find them.

        Args:
            exit_status: Exit code of pytest.
            complete: Whether every test ran.
            baseline: The report that the run was compared with.
        """
        start = self._build_start()
        finished_at = format_time(datetime.now(timezone.utc))
        run = msgspec.structs.replace(
            start.run, finished_at=finished_at, complete=complete, exit_status=exit_status
        )
        return msgspec.structs.replace(start, run=run, baseline=baseline, records=self.records)

    def write(self, report: Report) -> bool:
        """Write the report and remove the journal. On failure keep it, add a problem and return False."""
        content = encode_report(report)
        succeeded = True
        for path in map(self._free_path, self.paths):
            try:
                replace_file(path, content)
                self.written.append(path)
            except ReportError as error:
                # The journal may have been deleted with its directory.
                journal = self._journal if self._journal and self._journal.path.exists() else None
                if journal is None or self._journal_is_short:
                    kept = self._write_elsewhere(path, content)
                else:
                    kept = f"; the journal {journal.path} is kept: llenergy merge"
                self.problems.append(f"{error}{kept}")
                succeeded = False
        if self._journal is not None:
            self._journal.close(remove=succeeded)
        return succeeded

    def _free_path(self, path: Path) -> Path:
        """Return the path, or one beside it if another run has written it since this one began."""
        try:
            written_s = path.stat().st_mtime
        except OSError:
            return path
        # A time in the future is that of another clock.
        is_free = not self._started.timestamp() < written_s <= time.time()
        return path if is_free else path.with_name(f"{path.stem}.{self.run_id}{path.suffix}")

    def _write_elsewhere(self, path: Path, content: bytes) -> str:
        """Write a report that nothing else holds, as on a full disk, to the temporary files."""
        elsewhere = Path(tempfile.gettempdir()) / f"{path.stem}.{self.run_id}{path.suffix}"
        try:
            replace_file(elsewhere, content)
        except ReportError:
            return ""
        return f"; it is {elsewhere} instead"

    def _build_start(self) -> Report:
        """Build the report without records, with which the journal begins."""
        run = RunInfo(
            id=self.run_id,
            started_at=format_time(self._started),
            finished_at=None,
            complete=False,
            argv=self._argv,
            exit_status=None,
        )
        environment = self._environment
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            run=run,
            source=self._source or Source(),
            environment=environment.with_hosts(self._hosts) if environment is not None else None,
            records=[],
        )
