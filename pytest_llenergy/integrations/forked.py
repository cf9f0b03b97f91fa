# SPDX-License-Identifier: Apache-2.0
"""pytest-forked: a record also for a test whose own process has died, of which nothing else comes back."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

PHASES = ("setup", "call", "teardown")


class Forked:
    """Knows which test runs while its report is told. ``is_measured`` says whether it asks for energy."""

    def __init__(self, is_measured: Callable[[pytest.Item], bool]) -> None:
        self._is_measured = is_measured
        self._item: pytest.Item | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before, self._item = self._item, item
        try:
            return (yield)
        finally:
            self._item = before

    # Before xdist sends it.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        item = self._item
        # pytest-forked makes one of no phase, past the hook that makes reports.
        if item is None or str(report.when) in PHASES or not self._is_measured(item):
            return
        from pytest_llenergy.recorder import attach_crash

        attach_crash(item, report)
