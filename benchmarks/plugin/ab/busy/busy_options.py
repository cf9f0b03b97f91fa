# SPDX-License-Identifier: Apache-2.0
"""Options of the suites of ``busy_run.py``, as a plugin: which work, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from busy_work import WORKS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--work", choices=list(WORKS), default="loop")
    parser.addoption("--size", type=float, default=1.0)


@pytest.fixture
def work(request: pytest.FixtureRequest) -> Callable[[], int]:
    """The work, after one call that loads what it needs."""
    function, size = WORKS[request.config.getoption("--work")], request.config.getoption("--size")
    function(0.1)
    return lambda: function(size)
