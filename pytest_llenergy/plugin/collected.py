# SPDX-License-Identifier: Apache-2.0
"""Which test files were skipped at collection, in runs that compare: their tests are not just unselected."""

from __future__ import annotations

import pytest

from pytest_llenergy.plugin.stash import SKIPPED_FILES
from pytest_llenergy.plugin.xdist import SKIPPED, worker_input_of


class SkippedFiles:
    """Plugin object of pytest's process, and of each worker of pytest-xdist, which tells the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._paths = config.stash.setdefault(SKIPPED_FILES, set())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._paths.add(report.nodeid.partition("::")[0])

    def pytest_collection_finish(self) -> None:
        worker_input_of(self._config).send(SKIPPED, sorted(self._paths))


def is_skipped(config: pytest.Config, test: str) -> bool:
    """Whether the file of a test, a part of it or a folder above was skipped or failed at collection."""
    file = test.partition("::")[0]
    return any(f"{file}/".startswith(f"{each}/") for each in config.stash[SKIPPED_FILES])
