# SPDX-License-Identifier: Apache-2.0
"""Where a run keeps what it has measured, looked at before hours are spent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_llenergy.options import SAVED


def check_writable(path: Path, flag: str = "--energy-report") -> None:
    """Nothing is created here. Raises ``pytest.UsageError``."""
    if path.exists() and not os.access(path, os.W_OK):
        raise pytest.UsageError(f"{flag}={path}: the file exists and cannot be written")
    directory = path.parent
    if not directory.is_dir():
        raise pytest.UsageError(f"{flag}={path}: no directory {directory}; make it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"{flag}={path}: no permission to write in {directory}")


def saved_as(config: pytest.Config, name: str) -> Path:
    """Where ``--energy-save=NAME`` keeps a report."""
    return config.rootpath / SAVED / f"{name}.json"


def check_savable(path: Path) -> None:
    """The same of a saved report, whose directory is made when there is something to save."""
    directory = path.parent if path.parent.is_dir() else path.parent.parent
    if path.exists() and not os.access(path, os.W_OK):
        raise pytest.UsageError(f"--energy-save={path.stem}: {path} exists and cannot be written")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"--energy-save={path.stem}: no permission to write in {directory}")
