# SPDX-License-Identifier: Apache-2.0
"""ReportBuilder: collect the records of a run, append each to the journal, and write the report."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType

import msgspec

import pytest_llenergy
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import Baseline
from pytest_llenergy.record.environment import Environment, describe_differences
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool, encode_report
from pytest_llenergy.record.text import escape_surrogates, format_time, relative_path
from pytest_llenergy.report.merge import merge_environments
from pytest_llenergy.report.provenance import collect_source
from pytest_llenergy.report.store import FileVersion, Journal, journal_path, version_of, write_beside


class ReportBuilder:
    """Keeps records by (id, attempt) in order of arrival.

    Args:
        path: File of the report; None keeps records in memory only.
        root: Root directory of the run, whose repository is the source.
        argv: The plugin's options on the command line.
        started: When the run began.
        copies: Further files for the report.
        versions: Versions of the files that the run writes when it began, as far as they existed.
        distributed: Whether other processes run the tests, so that this one must not load the GPU driver.

    Attributes:
        problems: Errors to show, such as files that could not be written.
        warnings: Lines to show that fail no run.
        notes: Warnings to show below the table.
        written: Files that have the report.
    """

    def __init__(
        self,
        path: Path | None,
        root: Path,
        argv: Sequence[str],
        started: datetime,
        *,
        copies: Sequence[Path] = (),
        versions: Mapping[Path, FileVersion | None] = MappingProxyType({}),
        distributed: bool = False,
    ) -> None:
        self.path = path
        self._copies = tuple(copies)
        self._versions = dict(versions)
        self._root = root
        self._argv: list[str] = escape_surrogates(list(argv))
        self._started = started
        self._distributed = distributed
        self.run_id: str = f"{self._started:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._records: dict[tuple[str, int], Record] = {}
        # Number under which an attempt is kept, by worker, record id and the worker's number of the attempt.
        self._attempts: dict[tuple[str, str, int], int] = {}
        # Environments of the tests by their encoding; None is that of this process, others those of workers.
        # One that is not known yet is None.
        self._environments: dict[bytes | None, Environment | None] = {}
        # Hosts of a cluster by name, and whether the journal lacks some.
        self._hosts: dict[str, Environment] = {}
        self._new_hosts = False
        self._journal: Journal | None = None
        self._journal_is_short = False
        self._source: Source | None = None
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.written: list[Path] = []

    @property
    def records(self) -> list[Record]:
        """Every record so far."""
        return list(self._records.values())

    def add(
        self,
        record: Record,
        *,
        worker: str = "",
        environment: bytes | None = None,
        hosts: Mapping[str, Environment] = MappingProxyType({}),
    ) -> None:
        """Keep a record and append it to the journal. A failure of the journal becomes a problem.

        What may take long is left to ``describe_run``, so that callers can hold off Ctrl-C.

        Args:
            record: The record of one attempt of a test.
            worker: Id of the worker that ran the test; empty for this process.
            environment: Encoded environment of the worker; None if it is that of this process.
            hosts: The hosts of a cluster on which the test ran, by name.
        """
        for name, host in hosts.items():
            if name not in self._hosts:
                self._hosts[name], self._new_hosts = host, True
                self.problems += [f"environment: {name}: {reason}" for reason in host.gpus_missing]
        record = self._with_attempt(record, worker)
        self._records[record.id, record.attempt] = record
        self._environments.setdefault(environment, None)
        if self.path is not None:
            self._append_to_journal(self.path, record)

    def _append_to_journal(self, path: Path, record: Record) -> None:
        try:
            if self._journal is None:
                self._journal = Journal(journal_path(path, self.run_id))
                self._journal.add(self._build_start())
            self._journal.add(record)
        except OSError as error:
            self._journal_is_short = True
            self.problems.append(f"journal of {path}: {error.strerror}; {record.id} is not in it")

    def describe_run(self) -> None:
        """Find the commit and the environments that are not known yet, also for the journal.

        Queries git and the GPU driver, which may take long. Ctrl-C may end it; a later call continues.
        """
        unknown = [each for each, found in self._environments.items() if found is None]
        if not unknown and self._source is not None and not self._new_hosts:
            return
        for encoded in unknown:
            self._add_environment(encoded)
        if self._source is None:
            self._source = collect_source(self._root)
        try:
            self._new_hosts = False
            if self._journal is not None:
                self._journal.add(self._build_start())
        except OSError as error:
            self.problems.append(f"journal of {self.path}: {error.strerror}; it does not name the machine")

    def _with_attempt(self, record: Record, worker: str) -> Record:
        """Number a test that is rerun after a crash as the next attempt.

        A crash after the test's record has arrived, such as in teardown, keeps the measurement.
        """
        key = worker, record.id, record.attempt
        attempt = self._attempts.get(key)
        if attempt is not None and record.status == "crashed":
            before = self._records[record.id, attempt]
            if before.status in ("failed", "crashed"):
                return before
            reason = f"{record.reason}, after its {before.status} result"
            return msgspec.structs.replace(before, status="crashed", reason=reason)
        attempt = record.attempt
        while (other := self._records.get((record.id, attempt))) is not None and other.status == "crashed":
            attempt += 1
        self._attempts[key] = attempt
        return msgspec.structs.replace(record, attempt=attempt)

    def build(self, exit_status: int, *, complete: bool, baseline: Baseline | None = None) -> Report | None:
        """Build the report, or return None if nothing was measured.

        It lacks commit and environment if ``describe_run`` did not find them.

        Args:
            exit_status: Exit code of pytest.
            complete: Whether every test ran.
            baseline: The report that the run was compared with.
        """
        if not self._records:
            return None
        start = self._build_start()
        finished_at = format_time(datetime.now(timezone.utc))
        run = msgspec.structs.replace(
            start.run, finished_at=finished_at, complete=complete, exit_status=exit_status
        )
        return msgspec.structs.replace(start, run=run, baseline=baseline, records=self.records)

    def write(self, report: Report) -> bool:
        """Write the report and remove the journal. On failure keep it, add a problem and return False."""
        assert self.path is not None
        content = encode_report(report)
        succeeded = True
        for path in (self.path, *self._copies):
            try:
                self.written.append(self.write_file(path, content, "report"))
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

    def _write_elsewhere(self, path: Path, content: bytes) -> str:
        """Write a report that nothing else holds, as on a full disk, to the temporary files."""
        elsewhere = Path(tempfile.gettempdir()) / f"{path.stem}.{self.run_id}{path.suffix}"
        try:
            replace_file(elsewhere, content)
        except ReportError:
            return ""
        return f"; it is {elsewhere} instead"

    def move_beside(self, path: Path) -> Path:
        """Write one of the files as ``NAME.partial.json`` instead; return that file."""
        beside = path.with_name(f"{path.stem}.partial{path.suffix}")
        self._versions[beside] = version_of(beside)
        if self.path == path:
            self.path = beside
        self._copies = tuple(beside if each == path else each for each in self._copies)
        return beside

    def write_file(self, path: Path, content: bytes, what: str) -> Path:
        """Write a file, beside the one that another run has written meanwhile, with a warning.

        Args:
            path: The file.
            content: Its content.
            what: What it holds, for the warning.

        Returns:
            The file that was written.

        Raises:
            ReportError: If it cannot be written.
        """
        written = write_beside(path, content, self._versions.get(path), self.run_id)
        if written != path:
            self.warnings.append(
                f"{relative_path(path)} was written by another run meanwhile, so this run's {what} is "
                f"{written.name} beside it"
            )
        return written

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
        return Report(
            schema_version=SCHEMA_VERSION,
            tool=Tool(name="pytest-llenergy", version=pytest_llenergy.__version__),
            run=run,
            source=self._source or Source(),
            environment=self._common_environment(),
            records=[],
        )

    @property
    def _known_environments(self) -> list[Environment]:
        return [each for each in self._environments.values() if each is not None]

    def _add_environment(self, encoded: bytes | None) -> None:
        if encoded is None:
            environment = collect_environment()
        else:
            environment = msgspec.json.decode(encoded, type=Environment)
        self.problems += [f"environment: {reason}" for reason in environment.gpus_missing]
        first = next(iter(self._known_environments), environment)
        if environment.key != first.key:
            differences = describe_differences(first, environment)
            self.notes.append(
                f"tests ran on different hardware ({differences}), so the report names no hardware and "
                "cannot be compared; use one run for each kind of hardware"
            )
        self._environments[encoded] = environment

    def _common_environment(self) -> Environment | None:
        """Merge the environments of all tests; return None if their hardware differs or is not known."""
        known = self._known_environments
        if not known or len(known) < len(self._environments):
            return None
        first, *others = known
        if any(each.key != first.key for each in others):
            return None
        return (merge_environments(known) if others else first).with_hosts(self._hosts)
