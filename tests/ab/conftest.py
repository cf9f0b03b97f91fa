# SPDX-License-Identifier: Apache-2.0
"""A project to compare commits of."""

from __future__ import annotations

from pathlib import Path

import pytest

from .project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "locks").mkdir()
    return Project(
        tmp_path / "project",
        {"LLENERGY_CACHE_DIR": str(tmp_path / "cache"), "LLENERGY_LOCK_DIR": str(tmp_path / "locks")},
    )
