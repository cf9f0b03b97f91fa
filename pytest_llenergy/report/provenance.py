# SPDX-License-Identifier: Apache-2.0
"""Find the commit of a run, for runs that measured something."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pytest_llenergy.record.report import Source

#: Time of one git command. A slow file system costs the commit, not the report.
GIT_TIMEOUT_S = 10.0


def collect_source(directory: Path) -> Source:
    """Return the checked-out commit, or an empty source if ``directory`` is not in a git repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return Source()
    branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    dirty = None if changes is None else bool(changes)
    return Source(commit=commit, branch=None if branch == "HEAD" else branch, dirty=dirty)


def _git(directory: Path, *args: str) -> str | None:
    command = ["git", "-C", str(directory), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
