# SPDX-License-Identifier: Apache-2.0
"""Hooks that only a run with tests of ours has: the record of a test goes on the report that decides it.

Reports are what pytest-xdist carries, so a worker that dies takes with it only the test that it was running.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from pytest_llenergy.engines import told_of_engines
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.failure import failure
from pytest_llenergy.process import BACKEND_PARAMETER, Known, is_measured
from pytest_llenergy.recorder import attach, note_part
from pytest_llenergy.state import leave_terminal


class Hooks:
    """A plugin object of such a run."""

    def pytest_report_collectionfinish(
        self, config: pytest.Config, items: Sequence[pytest.Item]
    ) -> str | None:
        """Which engines there are, where a test uses any."""
        used = any(BACKEND_PARAMETER in getattr(item, "fixturenames", ()) for item in items)
        return told_of_engines(config) if used else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Around those that are there by then, so that what they make of a test is what its record says."""
        # Of set-up and body they are failures already; this is of teardown, and of parts of a test.
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, LLEnergyError):
            call.excinfo = pytest.ExceptionInfo.from_exception(failure(item, call.when, error))
        report = yield
        if is_measured(item):
            # What is reported while the body runs is a subtest, not the test.
            (note_part if Known.in_body is item else attach)(item, report)
        return report

    def pytest_enter_pdb(self, config: pytest.Config) -> None:
        """A debugger has the terminal from now on."""
        leave_terminal(config)
