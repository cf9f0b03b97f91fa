# SPDX-License-Identifier: Apache-2.0
"""Closes the ranks that the tests of this directory shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .loaded_ranks import close_idle_ranks
from .servers.start import close_kept


@pytest.fixture(scope="package", autouse=True)
def _close_idle_ranks() -> Iterator[None]:
    yield
    close_idle_ranks()
    close_kept()
