# SPDX-License-Identifier: Apache-2.0
"""Write how long leases and whole tests take to the file that LLENERGY_TIMES names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

TIMES: list[tuple[str, str, float]] = []


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    begin_s = time.perf_counter()
    result = yield
    if fixturedef.argname == "_llenergy_lease":
        TIMES.append((request.node.originalname, "lease", time.perf_counter() - begin_s))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Function) -> Generator[None, object, object]:
    begin_s = time.perf_counter()
    result = yield
    TIMES.append((item.originalname, "test", time.perf_counter() - begin_s))
    return result


def pytest_sessionfinish() -> None:
    Path(os.environ["LLENERGY_TIMES"]).write_text(json.dumps(TIMES))
