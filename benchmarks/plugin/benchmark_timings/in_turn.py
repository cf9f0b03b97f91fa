# SPDX-License-Identifier: Apache-2.0
"""pytest plugin that makes two pytest processes run the same tests alternately, several times.

``IN_TURN`` in the environment holds the number of turns and two file descriptors: the process reads a byte
from the first before each test and writes a byte to the second after it. With one turn the tests keep their
names and order.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

times, may, over = map(int, os.environ["IN_TURN"].split())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise every test over the turns."""
    if times > 1:
        metafunc.fixturenames.append("turn")
        metafunc.parametrize("turn", range(times))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by turn."""
    # All items are functions with this parameter, which their type does not express.
    if times > 1:
        items.sort(key=lambda item: item.callspec.params["turn"])  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Wait for permission to run, then report the end of the test."""
    if not os.read(may, 1):
        pytest.exit("the controlling process has closed the pipe")
    result = yield
    os.write(over, b"\n")
    return result
