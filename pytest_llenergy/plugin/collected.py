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
        self._config = config
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._files: set[str] = set()
        self._broken: set[str] = set()
        self._functions: set[str] = set()

    def lacks(self, test: str) -> bool:
        """Whether the file of a test was collected without its function.

        Which parameters a function has may depend on the environment.
        """
        return (
            test.partition("::")[0] in self._files - self._broken and _function(test) not in self._functions
        )

    def is_broken(self, test: str) -> bool:
        """Whether the file of a test, a part of it or a folder above was skipped or failed at collection."""
        file = test.partition("::")[0]
        return any(f"{file}/".startswith(f"{each}/") for each in self._broken) or self._is_hidden(file)

    def _is_hidden(self, file: str) -> bool:
        """Whether a file was not collected although its folder was, as by ``collect_ignore``."""
        path = self._config.rootpath / file
        if not self._files or file in self._files or not path.exists():
            return False
        if any(self._config.getoption(name, None) for name in ("ignore", "ignore_glob", "lf")):
            return False
        folder = self._config.invocation_params.dir
        return any(folder / each in path.parents for each in self._config.args)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # For a part of a file, there is no report with the name of the file.
        if report.passed:
            self._files.add(report.nodeid)
        else:
            self._broken.add(report.nodeid.partition("::")[0])

    # Outermost: before tests are deselected.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        self._functions |= {_function(item.nodeid) for item in items}
        return (yield)

    def pytest_sessionfinish(self) -> None:
        if self._output is not None:
            self._output[COLLECTED] = [list(self._files), list(self._broken), list(self._functions)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        files, broken, functions = getattr(node, "workeroutput", {}).get(COLLECTED, ((), (), ()))
        self._files.update(files)
        self._broken.update(broken)
        self._functions.update(functions)


def _function(test: str) -> str:
    return test.partition("[")[0]


def collected_by(config: pytest.Config) -> Collected:
    """Return what a run that saves or compares has collected."""
    collected = config.pluginmanager.get_plugin(COLLECTED)
    assert isinstance(collected, Collected)
    return collected
