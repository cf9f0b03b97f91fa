# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST

from .groups import plan
from .survivors import marked


@pytest.fixture(autouse=True)
def _few_plugins(few_plugins: None) -> None:
    """Start inner runs faster."""


@pytest.fixture
def mark() -> Iterator[str]:
    """A marker in the environment of all processes that the test starts."""
    with marked() as mark:
        yield mark


@pytest.fixture
def host(mark: str) -> Iterator[LocalHost]:
    """A host whose ranks are forks; with ``spawn`` they have the same supervisor."""
    host = LocalHost("forkserver")
    yield host
    host.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    """The hosts of a plan, shared by a module."""
    host = LocalHost("spawn")
    yield {LOCALHOST: host}
    host.close()


@pytest.fixture
def pair(hosts: dict[str, Host]) -> Iterator[RankGroup]:
    """Two ranks without torch."""
    ranks = RankGroup(plan(2), hosts)
    yield ranks
    ranks.close()
