# SPDX-License-Identifier: Apache-2.0
"""The process that has the say: it receives records from the tests and writes the report.

Under pytest-xdist that is the controller, otherwise the only process. What receives them is imported when the
first arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.options.places import saved_as
from pytest_llenergy.options.settings import settings_of
from pytest_llenergy.process import hands_out

if TYPE_CHECKING:
    from pytest_llenergy.gating import Stored
    from pytest_llenergy.integrations.xdist_fleet import Baseline, Fleet
    from pytest_llenergy.model.record import Record
    from pytest_llenergy.model.report import Report
    from pytest_llenergy.report.collect import Collector


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
            from pytest_llenergy.integrations.xdist_fleet import Fleet

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
        from pytest_llenergy.report.file import replace_file
        from pytest_llenergy.report.html.page import render_report

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
        from pytest_llenergy.report.github import append_run

        try:
            append_run(self._last(), self._settings.layout, complete=report.run.complete)
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
            from pytest_llenergy.report.terminal import render

            writer = terminalreporter._tw
            text = render(
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
        from pytest_llenergy.report.journal import left_over

        for journal in left_over(self._paths[0]):
            terminalreporter.write_line(
                f"journal of a run that did not end, or has not yet: {_relative(journal)} (llenergy merge)"
            )

    def _collect(self, record: Record, node: object) -> None:
        if self._collector is None:
            from pytest_llenergy.report.collect import Collector

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

    def _baseline(self) -> Baseline | None:
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
    from pytest_llenergy.model.text import storable

    return msgspec.convert(storable(primitives), Record)


def _elsewhere(records: Sequence[Record]) -> list[str]:
    """One line for each place but this one where tests were measured."""
    from pytest_llenergy.errand import ELSEWHERE

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
    from pytest_llenergy.model.text import writable

    encoding = getattr(terminalreporter._tw._file, "encoding", None) or "utf-8"
    for line in writable(text, encoding).splitlines():
        terminalreporter.line(line)


def _relative(path: Path | None) -> str:
    assert path is not None
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
