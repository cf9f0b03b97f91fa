# SPDX-License-Identifier: Apache-2.0
"""Which tests there are, so that a test that a run lacks is known to be gone, unselected or skipped."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

#: Name of the plugin object.
COLLECTED = "llenergy-collected"


class Collected:
    """Plugin object of runs that save or compare: tests, selected or not, and whole files."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._files: set[str] = set()
        self._broken: set[str] = set()
        self._tests: set[str] = set()

    def lacks(self, test: str) -> bool:
        """Whether the file of a test was collected without it."""
        return test.partition("::")[0] in self._files - self._broken and test not in self._tests

    def is_broken(self, test: str) -> bool:
        """Whether the file of a test, or a part of it, was skipped as a whole or failed at collection."""
        return test.partition("::")[0] in self._broken

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


def collected_by(config: pytest.Config) -> Collected:
    """Return what a run that saves or compares has collected."""
    collected = config.pluginmanager.get_plugin(COLLECTED)
    assert isinstance(collected, Collected)
    return collected
