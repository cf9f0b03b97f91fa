# SPDX-License-Identifier: Apache-2.0
"""Tests that a report of ``--energy-save=NAME`` has and the next run with that name would lose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.plugin.xdist import record_id, worker_input_of
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests, escape_surrogates, relative_path
from pytest_llenergy.report.store import read_report


@dataclass(frozen=True)
class SavedReport:
    """The report that a run is to replace.

    Attributes:
        path: Its file.
        measured: The backend of each test that it has measured, by record id; empty without a backend.
    """

    path: Path
    measured: Mapping[str, str]

    def describe(self, names: Sequence[str]) -> str:
        """Describe some of its tests by their number and one name."""
        tests = count_tests(len(self.measured))
        return f"{len(names)} of {tests} of {relative_path(self.path)}, such as {names[0]}"

    def list_lost(
        self, records: Collection[Record], left_out: Collection[str], *, complete: bool
    ) -> list[str]:
        """Return the tests of which a run has no measurement, except those that are gone from the code.

        Args:
            records: The last attempt of each test of the run.
            left_out: Tests that the run has not selected.
            complete: Whether every selected test ran.
        """
        measured = {record.id for record in records if record.counts}
        others = {record.id for record in records} | set(left_out)
        return [name for name in self.measured if name not in measured and (name in others or not complete)]


def read_saved(config: pytest.Config) -> SavedReport | None:
    """Read the report that ``--energy-save`` is to replace; None if there is none.

    Raises:
        pytest.UsageError: The file is no report.
    """
    name = settings_of(config).save
    path = None if name is None else saved_as(config, name)
    if path is None or not path.exists():
        return None
    try:
        records = select_last_attempts(read_report(path, lean=True).records, str(path))
    except ReportError as error:
        raise usage_error(
            f"{_source(config)}: {error}; save under another name, or delete the file"
        ) from None
    backends = {
        name: each.backend.name if each.backend else "" for name, each in records.items() if each.counts
    }
    return SavedReport(path, backends)


def refuse_selection(config: pytest.Config, saved: SavedReport, left_out: Sequence[str]) -> None:
    """Refuse a run that was told to replace a report and leaves out some of its tests.

    An ini file may name a report for the runs of all tests: the report of another run is written beside it.

    Raises:
        pytest.UsageError: The option is on the command line.
    """
    if left_out and config.getoption("energy_save") is not None:
        raise usage_error(
            f"{_source(config)}: this run leaves out {saved.describe(left_out)}; select them too, save under "
            "another name, or delete the file"
        )


def _source(config: pytest.Config) -> str:
    return f"{option_source(config, 'save')}={settings_of(config).save}"


class Selection:
    """Plugin object of a process that collects: which tests of a saved report the run leaves out.

    A test that is not selected is left out, unless it is gone from the code: its file is, or its file or
    class was collected without it.

    Args:
        config: Configuration of the process.
        measured: ``SavedReport.measured``.
        tell: Receives the tests once collection has ended.
    """

    def __init__(
        self, config: pytest.Config, measured: Mapping[str, str], tell: Callable[[list[str]], None]
    ) -> None:
        self._config = config
        self._measured = measured
        self._tell = tell
        #: Tests and classes in each file and class, by name.
        self._children: dict[str, set[str]] = {}

    # Innermost: ``--lf`` removes tests from the report, and skips files by reports without any.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.result:
            self._children[collector.nodeid] = set(map(self._name, report.result))
        return report

    # Before xdist tells the controller that collection has ended.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # With errors, pytest runs no test.
        if not session.testsfailed or self._config.option.continue_on_collection_errors:
            selected = set(map(self._name, session.items))
            self._tell([name for name in self._measured if name not in selected and self._exists(name)])

    def _exists(self, name: str) -> bool:
        if not (self._config.rootpath / name.partition("::")[0]).exists():
            return False
        backend = self._measured[name]
        if backend and backend not in [spec.name for spec in state_of(self._config).selected_backends]:
            return True
        return all(
            any(f"{name}::".startswith(f"{child}::") for child in children)
            for parent, children in self._children.items()
            if name.startswith(f"{parent}::")
        )

    def _name(self, node: pytest.Item | pytest.Collector) -> str:
        if not isinstance(node, pytest.Item):
            return node.nodeid
        worker = worker_input_of(self._config)
        name: str = escape_surrogates(record_id(node.nodeid, label=worker.label, grouped=worker.grouped))
        return name
