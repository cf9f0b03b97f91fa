# SPDX-License-Identifier: Apache-2.0
"""A lock directory that every user may use, and processes that take leases in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .lockers import MakeLocker, lockers, open_directory


@pytest.fixture(autouse=True)
def _few_plugins(few_plugins: None) -> None:
    """Start inner runs faster."""


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where leases are agreed on in this test."""
    with open_directory() as path:
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(path))
        yield path


@pytest.fixture
def make(locks: Path) -> Iterator[MakeLocker]:
    """Starts processes that ask for devices when they are told to."""
    with lockers() as made:
        yield made
