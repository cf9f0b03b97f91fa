# SPDX-License-Identifier: Apache-2.0
"""A plugin by which two processes of pytest run the same tests in turn, each many times.

``IN_TURN`` in the environment has the number of times and two descriptors: from the first comes a byte when
this process may run its next test, into the second goes a byte when that is over.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

times, may, over = map(int, os.environ["IN_TURN"].split())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test so many times."""
    metafunc.fixturenames.append("turn")
    metafunc.parametrize("turn", range(times))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests once, then all of them again."""
    # All of them are functions with that parameter, which the type of an item does not say.
    items.sort(key=lambda item: item.callspec.params["turn"])  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Wait for the turn, and pass it on."""
    if not os.read(may, 1):
        pytest.exit("nobody waits for the next test")
    result = yield
    os.write(over, b"\n")
    return result
