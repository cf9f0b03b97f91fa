# SPDX-License-Identifier: Apache-2.0
"""Hooks of a run that has tests of ours: records go on the reports of the phases that decide tests.

Reports are what pytest-xdist carries, so a worker that dies takes with it only the test that it was running.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from pytest_llenergy.engines import told_of_engines
from pytest_llenergy.errand import errand_of, is_worker
from pytest_llenergy.process import BACKEND_PARAMETER, Known, is_measured
from pytest_llenergy.recorder import attach, note_part
from pytest_llenergy.state import leave_terminal


# First: from what xdist's own tells on, the controller waits for these tests, also if others here die.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell a controller what it is to wait for."""
    measured = [item.nodeid for item in session.items if is_measured(item)]
    if measured and is_worker(session.config):
        errand_of(session.config).tell_tests(measured)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """Which engines there are, where a test uses any."""
    used = any(BACKEND_PARAMETER in getattr(item, "fixturenames", ()) for item in items)
    return told_of_engines(config) if used else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Around all others, so that what they make of a test is what its record says."""
    report = yield
    if is_measured(item):
        # What is reported while the body runs is a subtest, not the test.
        (note_part if Known.in_body is item else attach)(item, report)
    return report


def pytest_enter_pdb(config: pytest.Config) -> None:
    """A debugger has the terminal from now on."""
    leave_terminal(config)
