# SPDX-License-Identifier: Apache-2.0
"""Collects records, appends them to the journal and writes the report."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import pytest_llenergy
from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.comparison import Baseline
from pytest_llenergy.model.environment import Environment
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.report import SCHEMA_VERSION, Report, RunInfo, Source, Tool
from pytest_llenergy.model.text import escape_surrogates
from pytest_llenergy.options import saved_as, settings_of
from pytest_llenergy.report.merge import describe_differences, merge_environments
from pytest_llenergy.report.provenance import collect_environment, collect_source
from pytest_llenergy.report.store import Journal, journal_path, redact_urls, write_report
from pytest_llenergy.stash import hands_out

if TYPE_CHECKING:
    from pytest_llenergy.gating import Stored
    from pytest_llenergy.xdist import BaselineFile, Fleet


# The process that has the say: it receives records from the tests and writes the report.
#
# Under pytest-xdist that is the controller, otherwise the only process. What receives them is imported when
# the first arrives.


class Controller:
    """A plugin object, registered on the controller only. ``began_s`` is when the run did (seconds)."""

    def __init__(self, config: pytest.Config, began_s: float) -> None:
        self._config = config
        self._settings = settings = settings_of(config)
        self._paths = [settings.report] if settings.report is not None else []
        self._paths += [saved_as(config, settings.save)] if settings.save is not None else []
        self._started = datetime.fromtimestamp(began_s, timezone.utc)
        self._fleet: Fleet | None = None
        if hands_out(config):
            from pytest_llenergy.xdist import Fleet

            self._fleet = Fleet(config, self._baseline)
            config.pluginmanager.register(self._fleet, "llenergy-fleet")
        self._collector: Collector | None = None
        self._written = False
        self._shown: list[str] = []
        self._ungated: str | None = None
        self._unshown: str | None = None

    # A failure that belongs to no test: set here, it is known to the summary and in the exit code.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        ran = session.testscollected and not self._config.getoption("setuponly", False)
        if self._settings.compare is not None and ran:
            from pytest_llenergy.gating import nothing_judged

            insisted = self._config.getoption("energy_fail_on", None) is not None
            self._ungated = nothing_judged(self._last(), self._settings, insisted=insisted)
            session.testsfailed += self._ungated is not None
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        primitives = getattr(report, "llenergy", None)
        if primitives is not None:
            self._collect(_record(primitives), getattr(report, "node", None))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        node = report.node
        attempt = self._fleet.begun(node, crashitem) if self._fleet is not None else None
        if self._fleet is None or attempt is None:
            return
        text = str(report.longrepr).strip().splitlines()
        reason = text[0] if text else "the worker died"
        name = self._fleet.record_id(node, crashitem)
        lost = _record({"id": name, "attempt": attempt, "status": "crashed", "reason": reason})
        self._collect(lost, node)

    # First, so that the summary is told of a report that could not be written.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        collector = self._collector
        if collector is None:
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        stopped = bool(session.shouldstop or session.shouldfail)
        left_out = self._fleet is not None and self._fleet.left_out
        complete = ended and not stopped and not left_out
        stored = self._stored()
        baseline = stored.told({record.id for record in collector.records}) if stored is not None else None
        report = collector.finish(int(exitstatus), complete=complete, baseline=baseline)
        if report is None:
            return
        done = True
        if collector.path is not None:
            self._config.hook.pytest_llenergy_report(config=self._config, report=report)
            done = self._written = collector.write(report)
        if self._settings.html is not None:
            done = self._show(report, self._settings.html, collector.problems) and done
        if self._settings.keeps_something:
            self._summarise(report)
        if ended and not done:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _show(self, report: Report, path: Path, problems: list[str]) -> bool:
        """Write the page. One that cannot be written is a problem to tell, and leaves the report as it is."""
        from pytest_llenergy.errors import ReportError
        from pytest_llenergy.report.html.page import render_report
        from pytest_llenergy.report.store import replace_file

        try:
            replace_file(path, render_report(report).encode())
        except ReportError as error:
            problems.append(str(error))
            return False
        self._shown.append(f"energy page: {_relative(path)}")
        return True

    def _summarise(self, report: Report) -> None:
        """Add to the summary of a step of GitHub Actions. What is shown there decides about no test."""
        from pytest_llenergy.errors import ReportError
        from pytest_llenergy.report.ci import append_run_summary

        try:
            append_run_summary(self._last(), self._settings.layout, complete=report.run.complete)
        except ReportError as error:
            self._unshown = f"no step summary: {error}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        collector = self._collector
        quiet = self._config.get_verbosity() < 0
        if collector is None:
            if not quiet:
                for path in filter(None, [*self._paths, self._settings.html]):
                    told = f"energy report: no test was measured, {path} was not written"
                    terminalreporter.write_line(told)
            self._tell_gates(terminalreporter)
            return
        if not quiet:
            from pytest_llenergy.report.terminal import render_summary

            writer = terminalreporter._tw
            text = render_summary(
                self._last(),
                writer.fullwidth,
                color=writer.hasmarkup,
                layout=self._settings.layout,
                verbosity=self._config.get_verbosity(),
            )
            if text:
                terminalreporter.section("energy")
                _write(terminalreporter, text)
            self._tell_verdicts(terminalreporter)
        self._tell_gates(terminalreporter)
        for problem in collector.problems:
            terminalreporter.write_line(f"ERROR: {problem}", red=True)
        last = self._last()
        for note in (
            [] if quiet else [*_elsewhere(last), *_earlier(collector.records, last), *collector.notes]
        ):
            terminalreporter.write_line(f"energy: {note}", yellow=True)
        if self._unshown is not None:
            terminalreporter.write_line(f"energy: {self._unshown}", yellow=True)
        if self._written and not quiet:
            for path in self._paths:
                terminalreporter.write_line(f"energy report: {_relative(path)}")
            self._tell_left_over(terminalreporter)
        for line in [] if quiet else self._shown:
            terminalreporter.write_line(line)

    def _tell_verdicts(self, terminalreporter: Any) -> None:
        stored = self._stored()
        comparisons = [each for record in self._last() for each in record.comparisons]
        if stored is None or not comparisons:
            return
        from pytest_llenergy.report.verdicts import render_verdicts

        writer = terminalreporter._tw
        terminalreporter.section(f"energy, compared with {stored.origin}")
        text = render_verdicts(comparisons, writer.fullwidth, color=writer.hasmarkup)
        _write(terminalreporter, text)

    def _tell_gates(self, terminalreporter: Any) -> None:
        """Not for ``-q`` to hide: silence would be taken for a pass."""
        records = self._last()
        if self._settings.compare is not None or any(record.comparisons for record in records):
            from pytest_llenergy.gating import ungated_lines

            for line in ungated_lines(self._stored(), records, self._settings.inconclusive):
                terminalreporter.write_line(line, yellow=True)
        if self._ungated is not None:
            terminalreporter.write_line(f"ERROR: {self._ungated}", red=True)

    def _tell_left_over(self, terminalreporter: Any) -> None:
        from pytest_llenergy.report.store import find_journals

        for journal in find_journals(self._paths[0]):
            terminalreporter.write_line(
                f"journal of a run that did not end, or has not yet: {_relative(journal)} (llenergy merge)"
            )

    def _collect(self, record: Record, node: object) -> None:
        if self._collector is None:
            args = self._config.invocation_params.args
            if self._settings.save is not None:
                # What is wrong with it shows when the report is written.
                with suppress(OSError):
                    self._paths[-1].parent.mkdir(exist_ok=True)
            self._collector = Collector(
                self._paths[0] if self._paths else None,
                self._config.rootpath,
                [str(arg) for arg in args],
                self._started,
                copies=self._paths[1:],
                # Whether others run the tests.
                apart=self._config.pluginmanager.has_plugin("dsession"),
            )
        told = self._fleet.runs_on(node) if self._fleet is not None else None
        self._collector.add(record, worker=_worker(node), told=told)

    def _stored(self) -> Stored | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.gating import gating_of

        return gating_of(self._config).stored

    def _baseline(self) -> BaselineFile | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.gating import gating_of

        return gating_of(self._config).brought

    def _last(self) -> list[Record]:
        """The record of the last attempt of each test."""
        records = self._collector.records if self._collector is not None else []
        return list({record.id: record for record in records}.values())


def _record(primitives: dict[str, Any]) -> Record:
    import msgspec

    from pytest_llenergy.model.record import Record
    from pytest_llenergy.model.text import escape_surrogates

    return msgspec.convert(escape_surrogates(primitives), Record)


def _elsewhere(records: Sequence[Record]) -> list[str]:
    """One line for each place but this one where tests were measured."""
    from pytest_llenergy.xdist import ELSEWHERE

    places = Counter(flag.detail for record in records for flag in record.flags if flag.name == ELSEWHERE)
    return [f"{count} test{' was' if count == 1 else 's were'} {detail}" for detail, count in places.items()]


def _earlier(records: Sequence[Record], last: Sequence[Record]) -> list[str]:
    """That the table has the last attempts, where there were others."""
    count = len(records) - len(last)
    return [f"{count} earlier attempt{'' if count == 1 else 's'} not shown"] if count else []


def _worker(node: Any) -> str:
    """Who has run a test; empty for this process."""
    return "" if node is None else str(node.gateway.id)


def _write(terminalreporter: Any, text: str) -> None:
    from pytest_llenergy.model.text import encodable

    encoding = getattr(terminalreporter._tw._file, "encoding", None) or "utf-8"
    for line in encodable(text, encoding).splitlines():
        terminalreporter.line(line)


def _relative(path: Path | None) -> str:
    assert path is not None
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# The run as the controller sees it: records arrive, go to the journal, and make the report.


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
        self._argv: list[str] = escape_surrogates(redact_urls(argv))
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
                self.problems.append(escape_surrogates(f"{error}{kept}"))
                written = False
        if self._journal is not None:
            self._journal.close(remove=written)
        return written

    def _start(self) -> Report:
        """The report before its first record, by where tests have run so far."""
        if self._source is None:
            self._source = collect_source(self._root)
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
            found = collect_environment(apart=self._apart)
        else:
            found = msgspec.json.decode(told, type=Environment)
        self.problems += [f"environment: {reason}" for reason in found.gpus_missing]
        first = next(iter(self._places.values()), found)
        if found.key != first.key:
            self.notes.append(
                f"tests ran on different hardware ({describe_differences(first, found)}), and a report "
                "has one: it names none, and "
                "its figures compare with no others; measure on each in a run of its own"
            )
        self._places[told] = found

    def _environment(self) -> Environment | None:
        """What all tests ran on; ``None`` where that was not one kind of machine."""
        first, *others = self._places.values()
        if not others:
            return first
        alike = all(each.key == first.key for each in others)
        return merge_environments([first, *others]) if alike else None


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
