# SPDX-License-Identifier: Apache-2.0
"""Collect records, write the report and print the summary.

Under pytest-xdist this happens in the controller, otherwise in the only process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.interruption import UNFINISHED, Turns, hold_interrupts
from pytest_llenergy.plugin.settings import recorded_options, saved_as, settings_of
from pytest_llenergy.plugin.stash import distributes_tests
from pytest_llenergy.record.text import escape_invisible, relative_path

if TYPE_CHECKING:
    from pytest_llenergy.plugin.baseline import StoredBaseline
    from pytest_llenergy.plugin.report_builder import ReportBuilder
    from pytest_llenergy.plugin.saving import SavedReport
    from pytest_llenergy.plugin.xdist import BaselineFile, WorkerTracker
    from pytest_llenergy.record.record import Record
    from pytest_llenergy.record.report import Report
    from pytest_llenergy.report.store import FileVersion


#: Variable with which GitHub Actions names the step summary.
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


class Controller:
    """Plugin object of the process that keeps the records. The first record imports what handles records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._settings = settings = settings_of(config)
        self._paths = [settings.report] if settings.report is not None else []
        self._paths += [saved_as(config, settings.save)] if settings.save is not None else []
        self._started = datetime.now(timezone.utc)
        self._versions: dict[Path, FileVersion | None] = {}
        if self._paths or settings.html is not None:
            from pytest_llenergy.report.store import version_of

            self._versions = {path: version_of(path) for path in filter(None, [*self._paths, settings.html])}
        self._saved: SavedReport | None = None
        if settings.save is not None:
            from pytest_llenergy.plugin.saving import read_saved

            self._saved = read_saved(config)
        self._workers: WorkerTracker | None = None
        self._turns: Turns | None = None
        if distributes_tests(config):
            from pytest_llenergy.plugin.xdist import WorkerTracker

            self._workers = WorkerTracker(config, self._read_baseline_file)
            config.pluginmanager.register(self._workers, "llenergy-workers")
        elif settings.keeps_something:
            self._turns = Turns()
            config.pluginmanager.register(self._turns, "llenergy-turns")
        self._builder: ReportBuilder | None = None
        # For the summary: lines on written files, and errors.
        self._written: list[str] = []
        self._gate_errors: list[str] = []
        self._interrupted = False

    # First, so that nothing comes between the arrival of a record and its keeping.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.keep_record(report)
        # After the call phase, the files of a test may still be fake ones.
        if self._builder is not None and report.when not in UNFINISHED:
            self._builder.describe_run()

    def prepare(self) -> None:
        """Import what keeps records, and make their directory, before a test can replace files."""
        import pytest_llenergy.plugin.report_builder  # noqa: F401

        if self._settings.save is not None:
            # If this fails, writing the report fails too, and reports the error.
            with suppress(OSError):
                self._paths[-1].parent.mkdir(exist_ok=True)

    def keep_record(self, report: pytest.TestReport) -> None:
        """Keep the record of a report, if it has one, even during Ctrl-C. Later calls do nothing."""
        primitives = getattr(report, "llenergy", None)
        if primitives is None or hasattr(report, "llenergy_kept"):
            return
        with hold_interrupts():
            self._add_record(primitives, getattr(report, "node", None))
            vars(report)["llenergy_kept"] = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        from pytest_llenergy.plugin.xdist import was_interrupted

        node = report.node
        if was_interrupted(node):
            # For xdist, a worker that was interrupted in a test has crashed.
            report.longrepr = f"KeyboardInterrupt in worker {node.gateway.id} ended the run in this test"
        attempt = self._workers.crashed_attempt(node, crashitem) if self._workers is not None else None
        if self._workers is None or attempt is None:
            return
        lines = str(report.longrepr).strip().splitlines()
        record = {
            "id": self._workers.record_id(node, crashitem),
            "attempt": attempt,
            "status": "crashed",
            "reason": lines[0] if lines else "the worker died",
        }
        self._add_record(record, node)

    def _add_record(self, primitives: dict[str, Any], node: Any) -> None:
        import msgspec

        from pytest_llenergy.plugin.recorder import HOSTS
        from pytest_llenergy.plugin.report_builder import ReportBuilder
        from pytest_llenergy.record.environment import Environment
        from pytest_llenergy.record.record import Record
        from pytest_llenergy.record.text import escape_surrogates

        if self._builder is None:
            self.prepare()
            self._builder = ReportBuilder(
                self._paths[0] if self._paths else None,
                self._config.rootpath,
                recorded_options(self._config),
                self._started,
                copies=self._paths[1:],
                versions=self._versions,
                distributed=self._config.pluginmanager.has_plugin("dsession"),
            )
        fields = {name: value for name, value in primitives.items() if name != HOSTS}
        record = msgspec.convert(escape_surrogates(fields), Record)
        hosts = msgspec.convert(primitives.get(HOSTS, {}), dict[str, Environment])
        worker = "" if node is None else str(node.gateway.id)
        environment = self._workers.worker_environment(node) if self._workers is not None else None
        self._builder.add(record, worker=worker, environment=environment, hosts=hosts)
        if self._workers is not None:
            self._workers.note_kept(node, primitives)

    # A failure outside any test that is counted here still reaches the summary and the exit code.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            result = yield
        except pytest.exit.Exception:
            # A test can end the run with exit code 0.
            self._interrupted = True
            self._check_gates(session)
            raise
        except BaseException:
            # Ctrl-C, or an internal error, which xdist also makes of a worker that was interrupted twice.
            self._interrupted = True
            raise
        self._check_gates(session)
        return result

    def _check_gates(self, session: pytest.Session) -> None:
        ran = session.testscollected and not self._config.getoption("setuponly", False)
        if self._settings.compare is not None and ran:
            from pytest_llenergy.plugin.gate_coverage import list_gate_errors

            given = (self._config.getoption(name, None) for name in ("energy_fail_on", "energy_compare"))
            on_command_line = any(each is not None for each in given)
            self._gate_errors = list_gate_errors(
                self._stored_baseline(),
                self._last_attempts,
                self._config,
                on_command_line=on_command_line,
                stopped=self._interrupted or self._left_tests_out(),
            )
        session.testsfailed += len(self._gate_errors)

    # Innermost, so that the summary, which another wrapper prints, has what this one did after the ``yield``.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int | pytest.ExitCode
    ) -> Generator[None, object, object]:
        if self._gate_errors and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._workers is None or not self._interrupted:
            self._keep_report(session, exitstatus)
            return (yield)
        # Records may still arrive until xdist has ended its workers.
        self._add_arrived()
        try:
            return (yield)
        finally:
            self._add_arrived()
            self._keep_report(session, exitstatus)

    def _add_arrived(self) -> None:
        """Add the records that have arrived but that xdist, which was interrupted, has not handled."""
        if self._workers is not None:
            with hold_interrupts():
                for node, primitives in self._workers.list_arrived():
                    self._add_record(primitives, node)

    def _left_tests_out(self) -> bool:
        counted = self._workers or self._turns
        return counted is not None and counted.tests_left_out

    def _keep_report(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write report, page and step summary. Ctrl-C ends what may take long, never the report."""
        builder = self._builder
        if builder is None:
            return
        try:
            builder.describe_run()
        except KeyboardInterrupt:
            exitstatus = self._note_interrupt(session, "the report may not name the commit and the machine")
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        stored = self._stored_baseline()
        report = builder.build(
            int(exitstatus),
            complete=ended and not self._left_tests_out(),
            baseline=stored.describe(self._last_attempts) if stored is not None else None,
        )
        if report is None:
            return
        succeeded = True
        if builder.path is not None:
            try:
                self._config.hook.pytest_llenergy_report(config=self._config, report=report)
            except KeyboardInterrupt:
                exitstatus = self._note_interrupt(session, "a hook pytest_llenergy_report did not end")
                report = builder.build(
                    int(exitstatus), complete=report.run.complete, baseline=report.baseline
                )
                assert report is not None
            except Exception as error:  # code of the user, which must not cost the report
                builder.problems.append(f"a hook pytest_llenergy_report raised {_locate_error(error)}")
                succeeded = False
        try:
            if builder.path is not None:
                succeeded = self._write_report(report, builder) and succeeded
            if self._settings.html is not None:
                succeeded = self._write_page(report, self._settings.html, builder) and succeeded
            if self._settings.keeps_something and os.environ.get(STEP_SUMMARY):
                self._append_step_summary(report, builder)
        except KeyboardInterrupt:
            if builder.path is None or builder.written:
                effect = "it is complete, but a page or step summary may be missing"
            else:
                effect = "its journal is kept: llenergy merge"
            exitstatus = self._note_interrupt(session, effect)
        if ended and not succeeded and exitstatus != pytest.ExitCode.INTERRUPTED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _note_interrupt(self, session: pytest.Session, effect: str) -> pytest.ExitCode:
        assert self._builder is not None
        self._builder.problems.append(f"interrupted while the energy report was written: {effect}")
        session.exitstatus = pytest.ExitCode.INTERRUPTED
        return pytest.ExitCode.INTERRUPTED

    def _write_report(self, report: Report, builder: ReportBuilder) -> bool:
        """Write the report and its copies. On failure return False; the builder has the problem."""
        saved = self._saved
        lost, gone = saved.list_missing(self._last_attempts, self._config) if saved else ([], [])
        if saved and gone and not lost:
            builder.warnings.append(f"no longer there, and dropped: {saved.describe(gone)}")
        if saved and lost:
            beside = builder.move_beside(saved.path)
            builder.warnings.append(
                f"this run has not measured {saved.describe(lost)}: that file stays, and this run's report "
                f"is {beside.name} beside it; to drop these tests, delete the file and run again"
            )
        # The reader of a pipe may never come.
        waits = any(path.exists() and not path.is_file() for path in self._paths)
        with nullcontext() if waits else hold_interrupts():
            succeeded = builder.write(report)
            self._written += [f"energy report: {relative_path(path)}" for path in builder.written]
            if succeeded:
                self._written += _describe_left_journals(self._paths[0])
        return succeeded

    def _write_page(self, report: Report, path: Path, builder: ReportBuilder) -> bool:
        """Write the HTML page. On failure add a problem and return False."""
        from pytest_llenergy.report.html.page import render_report

        try:
            written = builder.write_file(path, render_report(report).encode(), "page")
        except ReportError as error:
            builder.problems.append(str(error))
            return False
        except Exception as error:  # must cost neither the step summary nor the table of the terminal
            why = f"rendering it raised {_locate_error(error)}"
            builder.problems.append(f"{relative_path(path)} was not written: {why}")
            return False
        self._written.append(f"energy page: {relative_path(written)}")
        return True

    def _append_step_summary(self, report: Report, builder: ReportBuilder) -> None:
        """Append to the step summary of GitHub Actions. An error is shown but does not fail the run."""
        from pytest_llenergy.report.ci import append_run_summary

        try:
            append_run_summary(self._last_attempts, self._settings.layout, complete=report.run.complete)
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
            self._print_table(terminalreporter)
        self._print_verdicts(terminalreporter, quiet=quiet)
        self._print_gates(terminalreporter)
        for problem in self._builder.problems:
            _print_line(terminalreporter, f"ERROR: {problem}", red=True)
        for warning in self._builder.warnings:
            _print_line(terminalreporter, f"energy: {warning}", yellow=True)
        # Also with -q, which hides the table: scripts and people look for the file.
        for line in self._written:
            _print_line(terminalreporter, line)

    def _print_table(self, terminalreporter: Any) -> None:
        from pytest_llenergy.report.terminal import render_summary

        writer = terminalreporter._tw
        last = self._last_attempts
        records, notes = ([], []) if self._builder is None else (self._builder.records, self._builder.notes)
        layout = self._settings.layout
        text = render_summary(
            last,
            writer.fullwidth,
            color=writer.hasmarkup,
            layout=layout,
            verbosity=self._config.get_verbosity(),
            notes=[
                *notes,
                *_count_elsewhere(last),
                *_count_earlier(records, last),
            ],
            with_times=self._config.getoption("durations", None) is not None,
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
            from pytest_llenergy.plugin.gate_coverage import describe_ungated

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

    def _read_baseline_file(self) -> BaselineFile | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.plugin.baseline import read_baseline_file

        return read_baseline_file(self._config)

    @property
    def _last_attempts(self) -> list[Record]:
        records = self._builder.records if self._builder is not None else []
        return list({record.id: record for record in records}.values())


def _count_elsewhere(records: Iterable[Record]) -> list[str]:
    """Return a line for each other host or Python in which tests were measured."""
    from pytest_llenergy.plugin.xdist import ELSEWHERE

    places = Counter(flag.detail for record in records for flag in record.flags if flag.name == ELSEWHERE)
    return [f"{count} test{' was' if count == 1 else 's were'} {detail}" for detail, count in places.items()]


def _count_earlier(records: Sequence[Record], last: Sequence[Record]) -> list[str]:
    """Return a line on earlier attempts, which the table leaves out; nothing if there are none."""
    count = len(records) - len(last)
    return [f"{count} earlier attempt{'' if count == 1 else 's'} not shown"] if count else []


def _describe_left_journals(path: Path) -> list[str]:
    from pytest_llenergy.report.store import find_journals

    return [
        f"journal of a killed or running run: {relative_path(journal)} (llenergy merge)"
        for journal in find_journals(path)
    ]


def _locate_error(error: Exception) -> str:
    """Return an error on one line, with the place that raised it."""
    from pytest_llenergy.record.entry_points import describe_error

    *_, place = extract_tb(error.__traceback__)
    return f"{describe_error(error)} ({relative_path(Path(place.filename))}:{place.lineno})"


def _print_line(terminalreporter: Any, line: str, **markup: bool) -> None:
    """Print a line that may contain names of files and tests, escaped."""
    terminalreporter.write_line(escape_invisible(line), **markup)


def _print_text(terminalreporter: Any, text: str) -> None:
    encoding = getattr(terminalreporter._tw._file, "encoding", None) or "utf-8"
    for line in text.encode(encoding, "backslashreplace").decode(encoding).splitlines():
        terminalreporter.line(line)
