# SPDX-License-Identifier: Apache-2.0
"""The README as it is published: whole addresses where a release is built, and the same text elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .links import links
from .pages import ROOT

RELEASE = {
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "someone/pytest-llenergy",
    "GITHUB_REF_NAME": "v1.2.3",
}


def published(**environment: str) -> str:
    """By the program that builds the package."""
    own = {name: value for name, value in os.environ.items() if name not in RELEASE}
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    done = subprocess.run(
        command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_where_nothing_is_released_it_is_the_file() -> None:
    assert published().strip() == (ROOT / "README.md").read_text().strip()


def test_of_a_release_every_link_leads_to_its_files(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(published(**RELEASE))
    there = [link for _, link in links(ROOT / "README.md")]
    now = [link for _, link in links(page)]
    assert len(now) == len(there) > 10
    for before, after in zip(there, now, strict=True):
        kind = "raw" if before.endswith((".svg", ".png")) else "blob"
        if ":" not in before:
            assert after == f"https://github.com/someone/pytest-llenergy/{kind}/v1.2.3/{before}"
        else:
            assert after == before
