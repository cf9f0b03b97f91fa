# SPDX-License-Identifier: Apache-2.0
"""Tests that a report of ``--energy-save=NAME`` has and a run with that name would lose."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.compare.pairing import select_last_attempts
from pytest_llenergy.errors import ReportError
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import option_source, saved_as, settings_of, usage_error
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import count_tests, relative_path
from pytest_llenergy.report.store import read_report

#: Name of the plugin object that knows which tests there are.
COLLECTED = "llenergy-collected"


@dataclass(frozen=True)
class SavedReport:
    """The report that a run is to replace: its file, and the backends of the tests that it has measured."""

    path: Path
    measured: Mapping[str, str | None]

    def describe(self, names: Sequence[str]) -> str:
        """Describe some of its tests by their number and one name."""
        tests = count_tests(len(self.measured))
        return f"{len(names)} of {tests} of {relative_path(self.path)}, such as {names[0]}"

    def list_lost(self, records: Collection[Record], config: pytest.Config) -> list[str]:
        """Return the tests that a run has not measured, except those that are gone.

        Those are tests whose file is gone, or was collected whole without them.
        """
        measured = {record.id for record in records if record.counts}
        missing = (name for name in self.measured if name not in measured)
        lost = [name for name in missing if (config.rootpath / name.partition("::")[0]).exists()]
        # These hide tests from collection, or give them other names.
        if not lost or config.getoption("lf", False) or config.getoption("dist", "no") == "each":
            return lost
        collected = config.pluginmanager.get_plugin(COLLECTED)
        assert isinstance(collected, Collected)
        backends = {None, *(spec.name for spec in state_of(config).selected_backends)}
        return [name for name in lost if self.measured[name] not in backends or not collected.lacks(name)]


class Collected:
    """Plugin object of ``--energy-save``: which tests there are, selected or not, in which whole files."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._files: set[str] = set()
        self._broken: set[str] = set()
        self._tests: set[str] = set()

    def lacks(self, test: str) -> bool:
        """Whether the file of a test was collected without it."""
        return test.partition("::")[0] in self._files - self._broken and test not in self._tests

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # For a part of a file, there is no report with the name of the file.
        if report.passed:
            self._files.add(report.nodeid)
        else:
            self._broken.add(report.nodeid.partition("::")[0])

    # Outermost: before tests are deselected.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        self._tests |= {item.nodeid for item in items}
        return (yield)

    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            self._output[COLLECTED] = [list(self._files), list(self._broken), list(self._tests)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        files, broken, tests = getattr(node, "workeroutput", {}).get(COLLECTED, ((), (), ()))
        self._files.update(files)
        self._broken.update(broken)
        self._tests.update(tests)


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
        source = f"{option_source(config, 'save')}={name}"
        raise usage_error(f"{source}: {error}; save under another name, or delete the file") from None
    measured = {
        name: str(each.params.get("backend")) if each.backend is not None else None
        for name, each in records.items()
        if each.counts
    }
    return SavedReport(path, measured)
