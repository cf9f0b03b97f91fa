# SPDX-License-Identifier: Apache-2.0
"""A project to compare commits of."""

from __future__ import annotations

from pathlib import Path

import pytest

from .project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)
