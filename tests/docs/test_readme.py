# SPDX-License-Identifier: Apache-2.0
"""The README on PyPI: a release has absolute links, everything else the file's own text."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .links import links
from .pages import ROOT

RELEASE = "https://github.com/someone/pytest-llenergy/blob/v1.2.3"


#: In a source distribution, hatchling uses the metadata that were built with it.
OF_A_CHECKOUT = pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an unpacked source distribution")


def published(**environment: str) -> str:
    """Return the README as the build backend gives it."""
    own = {name: value for name, value in os.environ.items() if name != "README_LINKS"}
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    done = subprocess.run(
        command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


@OF_A_CHECKOUT
def test_outside_a_release_the_readme_is_unchanged() -> None:
    assert published().strip() == (ROOT / "README.md").read_text().strip()


@OF_A_CHECKOUT
def test_in_a_release_every_link_is_absolute(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(published(README_LINKS=RELEASE))
    there = [link for _, link in links(ROOT / "README.md")]
    now = [link for _, link in links(page)]
    assert len(now) == len(there) > 10
    for before, after in zip(there, now, strict=True):
        kind = "raw" if before.endswith((".svg", ".png")) else "blob"
        if ":" not in before:
            assert after == f"{RELEASE.replace('blob', kind)}/{before}"
        else:
            assert after == before


def test_the_release_workflow_sets_the_address_of_the_files() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    builds = [step for step in workflow["jobs"]["build"]["steps"] if "package" in step.get("run", "")]
    assert [set(step["env"]) for step in builds] == [{"README_LINKS"}]
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    assert "README_LINKS" in config["testenv:package"]["pass_env"].split()
