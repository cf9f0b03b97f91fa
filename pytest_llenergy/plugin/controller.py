# SPDX-License-Identifier: Apache-2.0
"""Collect records, write the report and print the summary.

Under pytest-xdist this happens in the controller, otherwise in the only process.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.interruption import hold_interrupts
from pytest_llenergy.plugin.settings import recorded_options, saved_as, settings_of
from pytest_llenergy.plugin.stash import distributes_tests
from pytest_llenergy.record.text import escape_invisible, relative_path

if TYPE_CHECKING:
    from pytest_llenergy.plugin.baseline import StoredBaseline
    from pytest_llenergy.plugin.report_builder import ReportBuilder
    from pytest_llenergy.plugin.saving import SavedReport
    from pytest_llenergy.plugin.xdist import WorkerTracker
    from pytest_llenergy.record.record import Record
    from pytest_llenergy.record.report import Report

#: Variable with which GitHub Actions names the step summary.
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"

#: Phases after whose reports a test still runs. Other reports end it: teardown, or a crash.
UNFINISHED = ("setup", "call")


class Controller:
    """Plugin object of the process that keeps the records. The first record imports what handles records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._settings = settings = settings_of(config)
        self._paths = [settings.report] if settings.report is not None else []
        self._paths += [saved_as(config, settings.save)] if settings.save is not None else []
        self._started = datetime.now(timezone.utc)
        self._saved: SavedReport | None = None
        if settings.save is not None:
            from pytest_llenergy.plugin.saving import read_saved

            self._saved = read_saved(config)
        self._workers: WorkerTracker | None = None
        if distributes_tests(config):
            from pytest_llenergy.plugin.xdist import WorkerTracker

            self._workers = WorkerTracker(config)
            config.pluginmanager.register(self._workers, "llenergy-workers")
        self._builder: ReportBuilder | None = None
        # The tests to run, and those that have ended. The exit code cannot tell whether all have:
        # ``pytest.exit`` sets any.
        self._selected: set[str] | None = None
        self._ended: set[str] = set()
        self._uncollected = False
        # For the summary: lines on written files, and errors.
        self._written: list[str] = []
        self._gate_errors: list[str] = []

    def prepare(self) -> None:
        """Import what keeps records, and make their directory, before a test can replace files."""
        import pytest_llenergy.plugin.report_builder  # noqa: F401

        if self._settings.save is not None:
            # If this fails, writing the report fails too, and reports the error.
            with suppress(OSError):
                self._paths[-1].parent.mkdir(exist_ok=True)

    def add_record(self, primitives: Mapping[str, Any], hosts: Mapping[str, Any]) -> None:
        """Keep a record, which a later one of the same test and attempt replaces."""
        import msgspec

        from pytest_llenergy.plugin.report_builder import ReportBuilder
        from pytest_llenergy.record.environment import Environment
        from pytest_llenergy.record.record import Record
        from pytest_llenergy.record.text import escape_surrogates

        if self._builder is None:
            self.prepare()
            root, options = self._config.rootpath, recorded_options(self._config)
            self._builder = ReportBuilder(self._paths, root, options, self._started)
        record = msgspec.convert(escape_surrogates(primitives), Record)
        self._builder.add(record, msgspec.convert(hosts, dict[str, Environment]))

    def _add_arrived(self) -> None:
        """Keep the records that workers have sent."""
        while self._workers is not None and self._workers.arrived:
            with hold_interrupts():
                self.add_record(*self._workers.arrived.popleft())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # With --continue-on-collection-errors the run goes on without the tests of that file.
        self._uncollected = self._uncollected or report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._selected = set(ids)

    # First, so that nothing comes between the arrival of a record and its keeping.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add_arrived()
        if report.when in UNFINISHED:
            return
        self._ended.add(report.nodeid)
        # After the call phase, the files of a test may still be fake ones.
        if self._builder is not None:
            self._builder.describe_run()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        self._add_arrived()
        assert self._workers is not None
        attempt = self._workers.crashed_attempt(report.node.gateway.id, crashitem)
        if attempt is not None:
            reason = next(iter(str(report.longrepr).strip().splitlines()), "the worker died")
            self.add_record({"id": crashitem, "attempt": attempt, "status": "crashed", "reason": reason}, {})

    # A failure outside any test that is counted here still reaches the summary and the exit code.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        if self._workers is None:
            self._selected = {item.nodeid for item in session.items}
        result = yield
        ran = session.testscollected and not self._config.getoption("setuponly", False)
        stored = self._stored_baseline()
        if stored is not None and ran:
            from pytest_llenergy.plugin.gating import list_gate_errors

            given = (self._config.getoption(name, None) for name in ("energy_fail_on", "energy_compare"))
            on_command_line = any(each is not None for each in given)
            self._gate_errors = list_gate_errors(
                stored, self._last_attempts, self._config, on_command_line=on_command_line
            )
        session.testsfailed += len(self._gate_errors)
        return result

    # Innermost, so that the summary, which another wrapper prints, has what this one did after the ``yield``.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            # If the run was interrupted, records arrive until xdist has ended its workers.
            self._add_arrived()
            self._keep_report(session, exitstatus)

    def _keep_report(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write report, page and step summary. Ctrl-C ends what may take long, never the report."""
        builder = self._builder
        if builder is None:
            return
        from pytest_llenergy.record.entry_points import locate_error

        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        all_ran = self._selected is not None and self._selected <= self._ended
        complete = ended and all_ran and not self._uncollected
        stored = self._stored_baseline()
        baseline = stored.describe(self._last_attempts) if stored is not None else None
        succeeded = True
        try:
            builder.describe_run()
            report = builder.build(int(exitstatus), complete=complete, baseline=baseline)
            try:
                if builder.paths:
                    self._config.hook.pytest_llenergy_report(config=self._config, report=report)
            except Exception as error:  # code of the user, which must not cost the report
                builder.problems.append(f"a hook pytest_llenergy_report raised {locate_error(error)}")
                succeeded = False
        except KeyboardInterrupt:
            exitstatus = self._note_interrupt(session, "it may lack commit, machine, and what hooks do")
            report = builder.build(int(exitstatus), complete=complete, baseline=baseline)
        try:
            if builder.paths:
                with hold_interrupts():
                    succeeded = self._write_report(report, builder) and succeeded
            if self._settings.html is not None:
                succeeded = self._write_page(report, self._settings.html, builder) and succeeded
            if self._settings.keeps_something and os.environ.get(STEP_SUMMARY):
                self._append_step_summary(report, builder)
        except KeyboardInterrupt:
            exitstatus = self._note_interrupt(session, "a page or step summary may be missing")
        if ended and not succeeded and exitstatus != pytest.ExitCode.INTERRUPTED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _note_interrupt(self, session: pytest.Session, effect: str) -> pytest.ExitCode:
        assert self._builder is not None
        self._builder.problems.append(f"interrupted while the energy report was written: {effect}")
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        return pytest.ExitCode.INTERRUPTED

    def _write_report(self, report: Report, builder: ReportBuilder) -> bool:
        """Write the report and its copies. On failure return False; the builder has the problem."""
        if (saved := self._saved) is not None:
            lost, gone = saved.list_missing(self._last_attempts, self._config.rootpath)
            if gone and not lost:
                builder.warnings.append(f"no longer there, and dropped: {saved.describe(gone)}")
            if lost:
                beside = saved.path.with_name(f"{saved.path.stem}.partial{saved.path.suffix}")
                builder.paths = [beside if each == saved.path else each for each in builder.paths]
                builder.warnings.append(
                    f"this run has not measured {saved.describe(lost)}: that file stays, and this run's "
                    f"report is {beside.name} beside it; to drop these tests, delete the file and run again"
                )
        succeeded = builder.write(report)
        self._written += [f"energy report: {relative_path(path)}" for path in builder.written]
        if succeeded:
            self._written += _describe_left_journals(self._paths[0])
        return succeeded

    def _write_page(self, report: Report, path: Path, builder: ReportBuilder) -> bool:
        """Write the HTML page. On failure add a problem and return False."""
        from pytest_llenergy.record.entry_points import locate_error
        from pytest_llenergy.record.files import replace_file
        from pytest_llenergy.report.html.page import render_report

        try:
            replace_file(path, render_report(report).encode())
        except ReportError as error:
            builder.problems.append(str(error))
            return False
        except Exception as error:  # must cost neither the step summary nor the table of the terminal
            why = f"rendering it raised {locate_error(error)}"
            builder.problems.append(f"{relative_path(path)} was not written: {why}")
            return False
        self._written.append(f"energy page: {relative_path(path)}")
        return True

    def _append_step_summary(self, report: Report, builder: ReportBuilder) -> None:
        """Append to the step summary of GitHub Actions. An error is shown but does not fail the run."""
        from pytest_llenergy.report.markdown import append_step_summary

        try:
            append_step_summary(self._last_attempts, self._settings.layout, complete=report.run.complete)
        except ReportError as error:
            builder.warnings.append(f"no step summary: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int | pytest.ExitCode) -> None:
        quiet = self._config.get_verbosity() < 0
        if self._builder is None:
            refused = exitstatus == pytest.ExitCode.USAGE_ERROR
            for path in filter(None, [*self._paths, self._settings.html] if not refused else []):
                _print_line(terminalreporter, f"energy report: no test was measured; {path} was not written")
            self._print_gates(terminalreporter)
            return
        if not quiet:
            self._print_table(terminalreporter, self._builder.records)
        self._print_verdicts(terminalreporter, quiet=quiet)
        self._print_gates(terminalreporter)
        for problem in self._builder.problems:
            _print_line(terminalreporter, f"ERROR: {problem}", red=True)
        for warning in self._builder.warnings:
            _print_line(terminalreporter, f"energy: {warning}", yellow=True)
        # Also with -q, which hides the table: scripts and people look for the file.
        for line in self._written:
            _print_line(terminalreporter, line)

    def _print_table(self, terminalreporter: Any, records: Sequence[Record]) -> None:
        from pytest_llenergy.report.terminal import render_summary

        writer, last = terminalreporter._tw, self._last_attempts
        earlier = len(records) - len(last)
        text = render_summary(
            last,
            writer.fullwidth,
            color=writer.hasmarkup,
            layout=self._settings.layout,
            verbose=self._config.get_verbosity() > 0,
            notes=[f"{earlier} earlier attempt{'' if earlier == 1 else 's'} not shown"] if earlier else [],
        )
        if text:
            terminalreporter.section("energy")
            _print_text(terminalreporter, text)

    def _print_verdicts(self, terminalreporter: Any, *, quiet: bool) -> None:
        stored = self._stored_baseline()
        comparisons = [each for record in self._last_attempts for each in record.comparisons]
        if stored is None or not comparisons:
            return
        from pytest_llenergy.report.verdicts import list_problems, render_verdicts

        if quiet:
            for line in list_problems(comparisons, stored.origin):
                _print_line(terminalreporter, line)
            return
        writer = terminalreporter._tw
        terminalreporter.section(escape_invisible(f"energy, compared with {stored.origin}"))
        _print_text(terminalreporter, render_verdicts(comparisons, writer.fullwidth, color=writer.hasmarkup))

    def _print_gates(self, terminalreporter: Any) -> None:
        """Print which gates were not decided, even with ``-q``: silence would look like a pass."""
        records = self._last_attempts
        if self._settings.compare is not None or any(record.comparisons for record in records):
            from pytest_llenergy.plugin.gating import describe_ungated

            with_lost = not any(" not compared: " in line for line in self._gate_errors)
            stored = self._stored_baseline()
            for line in describe_ungated(stored, records, self._config, with_lost=with_lost):
                _print_line(terminalreporter, line, yellow=True)
        for line in self._gate_errors:
            _print_line(terminalreporter, f"ERROR: {line}", red=True)

    def _stored_baseline(self) -> StoredBaseline | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.plugin.baseline import baseline_of

        return baseline_of(self._config)

    @property
    def _last_attempts(self) -> list[Record]:
        records = self._builder.records if self._builder is not None else []
        return list({record.id: record for record in records}.values())


def _describe_left_journals(path: Path) -> list[str]:
    from pytest_llenergy.report.store import find_journals

    return [
        f"journal of a killed or running run: {relative_path(journal)} (llenergy merge)"
        for journal in find_journals(path)
    ]


def _print_line(terminalreporter: Any, line: str, **markup: bool) -> None:
    """Print a line that may contain names of files and tests, escaped."""
    terminalreporter.write_line(escape_invisible(line), **markup)


def _print_text(terminalreporter: Any, text: str) -> None:
    encoding = getattr(terminalreporter._tw._file, "encoding", None) or "utf-8"
    for line in text.encode(encoding, "backslashreplace").decode(encoding).splitlines():
        terminalreporter.line(line)
