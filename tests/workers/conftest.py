# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .survivors import marked


@pytest.fixture
def mark() -> Iterator[str]:
    """In the environment of everything that the test starts."""
    with marked() as mark:
        yield mark
