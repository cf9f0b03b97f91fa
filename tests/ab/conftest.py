# SPDX-License-Identifier: Apache-2.0
"""A project to compare commits of."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.ab import campaign

from .fake import FakeSessions
from .project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> FakeSessions:
    """Sessions that measure nothing, but state joules."""
    fake = FakeSessions()
    monkeypatch.setattr(campaign, "run_session", fake)
    return fake
