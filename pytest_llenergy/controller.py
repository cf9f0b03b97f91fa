# SPDX-License-Identifier: Apache-2.0
"""The process that has the say: it receives records from the tests and writes the report.

Under pytest-xdist that is the controller, otherwise the only process. Nothing is imported before the
first record arrives.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.integrations.xdist import Running, is_controller
from pytest_llenergy.options import Settings

if TYPE_CHECKING:
    from pytest_llenergy.model.record import Record
    from pytest_llenergy.report.collect import Collector


class Controller:
    """A plugin object, registered on the controller only."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._started = datetime.now(timezone.utc)
        self._running = Running()
        self._collector: Collector | None = None
        self._written = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._running.see(report, measured=hasattr(report, "llenergy_measured"))
        primitives = getattr(report, "llenergy", None)
        if primitives is not None:
            self._collect(_record(primitives))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        if self._running.was_measuring(crashitem):
            text = str(report.longrepr).strip().splitlines()
            reason = text[0] if text else "the worker died"
            self._collect(_record({"id": crashitem, "attempt": 1, "status": "crashed", "reason": reason}))

    # First, so that the summary is told of a report that could not be written.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        collector = self._collector
        if collector is None:
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        stopped = bool(session.shouldstop or session.shouldfail)
        report = collector.finish(int(exitstatus), complete=ended and not stopped)
        if report is None or collector.path is None:
            return
        self._config.hook.pytest_llenergy_report(config=self._config, report=report)
        self._written = collector.write(report)
        if not self._written and ended:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        collector, path = self._collector, self._settings.report
        quiet = self._config.get_verbosity() < 0
        if collector is None:
            if path is not None and not quiet:
                terminalreporter.write_line(f"energy report: no test was measured, {path} was not written")
            return
        if not quiet:
            from pytest_llenergy.report.terminal import render

            writer = terminalreporter._tw
            text = render(collector.records, writer.fullwidth, color=writer.hasmarkup)
            if text:
                terminalreporter.section("energy")
                terminalreporter.write(text + "\n")
        for problem in collector.problems:
            terminalreporter.write_line(f"ERROR: {problem}", red=True)
        if self._written and not quiet:
            terminalreporter.write_line(f"energy report: {_relative(collector.path)}")
            self._tell_left_over(terminalreporter)

    def _tell_left_over(self, terminalreporter: Any) -> None:
        from pytest_llenergy.report.journal import left_over

        assert self._settings.report is not None
        for journal in left_over(self._settings.report):
            terminalreporter.write_line(
                f"journal of a run that did not end, or has not yet: {_relative(journal)} (llenergy merge)"
            )

    def _collect(self, record: Record) -> None:
        if self._collector is None:
            from pytest_llenergy.report.collect import Collector

            args = self._config.invocation_params.args
            self._collector = Collector(
                self._settings.report,
                self._config.rootpath,
                [str(arg) for arg in args],
                self._started,
                apart=is_controller(self._config),
            )
        self._collector.add(record)


def _record(primitives: dict[str, Any]) -> Record:
    import msgspec

    from pytest_llenergy.model.record import Record
    from pytest_llenergy.model.text import storable

    return msgspec.convert(storable(primitives), Record)


def _relative(path: Path | None) -> str:
    assert path is not None
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
