# SPDX-License-Identifier: Apache-2.0
"""A plugin that runs every test in a process of its own, and writes outcomes by node id."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_outcomes: dict[str, list[str]] = defaultdict(list)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests, in pytest's own process and in each test's."""
    for item in items if "ISOLATE_ALL" in os.environ else ():
        item.add_marker(pytest.mark.gpus(1, isolate=True, fallback="cpu"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a phase, and whether it was expected to fail."""
    xfail = " xfail" if hasattr(report, "wasxfail") else ""
    _outcomes[report.nodeid].append(f"{report.when} {report.outcome}{xfail}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes, in pytest's own process only."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["OUTCOMES"]).write_text(json.dumps(_outcomes))
