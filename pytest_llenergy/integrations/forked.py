# SPDX-License-Identifier: Apache-2.0
"""pytest-forked: record a crash of a test's process, which returns nothing else."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_llenergy.stash import is_measured

PHASES = ("setup", "call", "teardown")


class Forked:
    """Hooks that remember the running test, since the report of a crash does not name its item."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        outer, self._item = self._item, item
        try:
            return (yield)
        finally:
            self._item = outer

    # First, before xdist sends the report.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        item = self._item
        # pytest-forked creates a report without a phase, and without ``pytest_runtest_makereport``.
        if item is None or str(report.when) in PHASES or not is_measured(item):
            return
        from pytest_llenergy.recorder import add_crash_record

        add_crash_record(item, report)
