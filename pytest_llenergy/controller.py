# SPDX-License-Identifier: Apache-2.0
"""Collect records, write the report and print the summary.

Under pytest-xdist this happens in the controller, otherwise in the only process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.text import relative_path
from pytest_llenergy.options.settings import saved_as, settings_of
from pytest_llenergy.stash import distributes_tests

if TYPE_CHECKING:
    from pytest_llenergy.gating import StoredBaseline
    from pytest_llenergy.model.record import Record
    from pytest_llenergy.model.report import Report
    from pytest_llenergy.report.columns import Layout
    from pytest_llenergy.report_builder import ReportBuilder
    from pytest_llenergy.xdist import BaselineFile, WorkerTracker


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
        self._workers: WorkerTracker | None = None
        if distributes_tests(config):
            from pytest_llenergy.xdist import WorkerTracker

            self._workers = WorkerTracker(config, self._read_baseline_file)
            config.pluginmanager.register(self._workers, "llenergy-workers")
        self._builder: ReportBuilder | None = None
        # For the summary: lines on written files, and errors.
        self._written: list[str] = []
        self._gate_errors: list[str] = []
        self._summary_error: str | None = None
        self._left_early = False

    def pytest_sessionstart(self) -> None:
        if not self._settings.keeps_something:
            return
        from pytest_llenergy.session import state_of
        from pytest_llenergy.xdist import OPTIONS_WITHOUT_TESTS

        if not any(self._config.getoption(name, False) for name in OPTIONS_WITHOUT_TESTS):
            # Beside collection, which imports much.
            state_of(self._config).begin_counter_check()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        primitives = getattr(report, "llenergy", None)
        if primitives is not None:
            self._add_record(primitives, getattr(report, "node", None))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        node = report.node
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

        from pytest_llenergy.model.record import Record
        from pytest_llenergy.model.text import escape_surrogates
        from pytest_llenergy.report_builder import ReportBuilder

        if self._builder is None:
            if self._settings.save is not None:
                # If this fails, writing the report fails too, and reports the error.
                with suppress(OSError):
                    self._paths[-1].parent.mkdir(exist_ok=True)
            self._builder = ReportBuilder(
                self._paths[0] if self._paths else None,
                self._config.rootpath,
                [str(arg) for arg in self._config.invocation_params.args],
                self._started,
                copies=self._paths[1:],
                distributed=self._config.pluginmanager.has_plugin("dsession"),
            )
        record = msgspec.convert(escape_surrogates(primitives), Record)
        worker = "" if node is None else str(node.gateway.id)
        environment = self._workers.worker_environment(node) if self._workers is not None else None
        self._builder.add(record, worker=worker, environment=environment)

    # A failure outside any test that is counted here still reaches the summary and the exit code.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            result = yield
        except pytest.exit.Exception:
            # A test can end the run with exit code 0.
            self._left_early = True
            self._check_gates(session)
            raise
        self._check_gates(session)
        return result

    def _check_gates(self, session: pytest.Session) -> None:
        ran = session.testscollected and not self._config.getoption("setuponly", False)
        if self._settings.compare is not None and ran:
            from pytest_llenergy.gating import list_gate_errors

            given = (self._config.getoption(name, None) for name in ("energy_fail_on", "energy_compare"))
            on_command_line = any(each is not None for each in given)
            records = self._builder.records if self._builder is not None else []
            self._gate_errors = list_gate_errors(
                self._stored_baseline(), records, self._settings, on_command_line=on_command_line
            )
            session.testsfailed += len(self._gate_errors)

    # First, so that the summary shows an error in writing the report.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        if self._gate_errors and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        builder = self._builder
        if builder is None:
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        stopped = bool(session.shouldstop or session.shouldfail)
        left_out = self._workers is not None and self._workers.tests_left_out
        stored = self._stored_baseline()
        report = builder.build(
            int(exitstatus),
            complete=ended and not (stopped or left_out or self._left_early),
            baseline=stored.describe(self._last_attempts) if stored is not None else None,
        )
        if report is None:
            return
        succeeded = True
        if builder.path is not None:
            self._config.hook.pytest_llenergy_report(config=self._config, report=report)
            succeeded = builder.write(report)
            if succeeded:
                self._written += [f"energy report: {relative_path(path)}" for path in self._paths]
                self._written += _describe_left_journals(self._paths[0])
        if self._settings.html is not None:
            succeeded = self._write_page(report, self._settings.html, builder.problems) and succeeded
        if self._settings.keeps_something and os.environ.get(STEP_SUMMARY):
            self._append_step_summary(report)
        if ended and not succeeded:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write_page(self, report: Report, path: Path, problems: list[str]) -> bool:
        """Write the HTML page. On failure add a problem and return False."""
        from pytest_llenergy.report.html.page import render_report
        from pytest_llenergy.report.store import replace_file

        try:
            replace_file(path, render_report(report).encode())
        except ReportError as error:
            problems.append(str(error))
            return False
        self._written.append(f"energy page: {relative_path(path)}")
        return True

    def _append_step_summary(self, report: Report) -> None:
        """Append to the step summary of GitHub Actions. An error is shown but does not fail the run."""
        from pytest_llenergy.report.ci import append_run_summary

        try:
            append_run_summary(self._last_attempts, self._layout(), complete=report.run.complete)
        except ReportError as error:
            self._summary_error = f"no step summary: {error}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        quiet = self._config.get_verbosity() < 0
        if self._builder is None:
            for path in filter(None, [*self._paths, self._settings.html]):
                terminalreporter.write_line(f"energy report: no test was measured; {path} was not written")
            self._print_gates(terminalreporter)
            return
        if not quiet:
            self._print_table(terminalreporter)
        self._print_verdicts(terminalreporter, quiet=quiet)
        self._print_gates(terminalreporter)
        for problem in self._builder.problems:
            terminalreporter.write_line(f"ERROR: {problem}", red=True)
        if self._summary_error is not None:
            terminalreporter.write_line(f"energy: {self._summary_error}", yellow=True)
        # Also with -q, which hides the table: scripts and people look for the file.
        for line in self._written:
            terminalreporter.write_line(line)

    def _layout(self) -> Layout:
        has_gpus = self._builder is not None and self._builder.has_gpus
        return replace(self._settings.layout, with_device=has_gpus)

    def _print_table(self, terminalreporter: Any) -> None:
        from pytest_llenergy.report.terminal import render_summary

        writer = terminalreporter._tw
        last = self._last_attempts
        records, notes = ([], []) if self._builder is None else (self._builder.records, self._builder.notes)
        text = render_summary(
            last,
            writer.fullwidth,
            color=writer.hasmarkup,
            layout=self._layout(),
            verbosity=self._config.get_verbosity(),
            notes=[*notes, *_count_elsewhere(last), *_count_earlier(records, last)],
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
            _print_text(terminalreporter, "\n".join(list_problems(comparisons, stored.origin)))
            return
        writer = terminalreporter._tw
        terminalreporter.section(f"energy, compared with {stored.origin}")
        _print_text(terminalreporter, render_verdicts(comparisons, writer.fullwidth, color=writer.hasmarkup))

    def _print_gates(self, terminalreporter: Any) -> None:
        """Print which gates were not decided, even with ``-q``: silence would look like a pass."""
        records = self._last_attempts
        if self._settings.compare is not None or any(record.comparisons for record in records):
            from pytest_llenergy.gating import describe_ungated

            with_lost = not any("--energy-removed" in line for line in self._gate_errors)
            stored = self._stored_baseline()
            for line in describe_ungated(stored, records, self._settings, with_lost=with_lost):
                terminalreporter.write_line(line, yellow=True)
        for line in self._gate_errors:
            terminalreporter.write_line(f"ERROR: {line}", red=True)

    def _stored_baseline(self) -> StoredBaseline | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.gating import gating_of

        return gating_of(self._config).stored

    def _read_baseline_file(self) -> BaselineFile | None:
        if self._settings.compare is None:
            return None
        from pytest_llenergy.gating import gating_of

        return gating_of(self._config).read_baseline_file()

    @property
    def _last_attempts(self) -> list[Record]:
        records = self._builder.records if self._builder is not None else []
        return list({record.id: record for record in records}.values())


def _count_elsewhere(records: Iterable[Record]) -> list[str]:
    """Return a line for each other host or Python in which tests were measured."""
    from pytest_llenergy.xdist import ELSEWHERE

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


def _print_text(terminalreporter: Any, text: str) -> None:
    from pytest_llenergy.model.text import encodable

    encoding = getattr(terminalreporter._tw._file, "encoding", None) or "utf-8"
    for line in encodable(text, encoding).splitlines():
        terminalreporter.line(line)
