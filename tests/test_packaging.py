# SPDX-License-Identifier: Apache-2.0
"""What is published says of itself what is so: Pythons, dependencies, versions, licence, commands."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

import pytest_llenergy

from .test_import_rule import HEAVY

ROOT = Path(__file__).parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text()


def load(name: str) -> Any:
    return yaml.safe_load(text(name))


def environments() -> set[str]:
    """Those of tox, with the alternatives that a name has in braces."""
    found = re.findall(r"^\[testenv:([\w-]+)(?:\{(.*)\})?\]$", text("tox.ini"), re.MULTILINE)
    return {stem + ending for stem, endings in found for ending in endings.split(",")}


def test_every_supported_python_is_tested() -> None:
    project = text("pyproject.toml")
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={claimed[0]}"' in project
    assert [int(python[2:]) for python in claimed] == list(range(10, 10 + len(claimed)))
    assert load(".github/workflows/ci.yml")["jobs"]["base"]["strategy"]["matrix"]["python"] == claimed
    named = [name for name in environments() if re.fullmatch(r"base-py3\d+", name)]
    assert sorted(named) == [f"base-py{python.replace('.', '')}" for python in claimed]


def test_continuous_integration_names_environments_that_exist() -> None:
    matrix = load(".github/workflows/ci.yml")["jobs"]["base"]["strategy"]["matrix"]
    named = [*matrix["env"], *(each["env"] for each in matrix["include"])]
    release = re.findall(r"tox run -e (\S+)", text(".github/workflows/release.yml"))
    called = {name for names in [*named, *release] for name in names.split(",")}
    assert called - environments() == set()


def test_the_base_package_needs_nothing_heavy() -> None:
    needed = [line for line in requires("pytest-llenergy") or () if "extra ==" not in line]
    names = {re.split(r"[^\w-]", line)[0] for line in needed}
    assert "pytest" in names
    # nvidia-ml-py is one file of Python, and is imported where a board is looked for. numpy solves for
    # windows that share ticks, and is imported where a counter ticks.
    assert not names & {name.replace("_", "-") for name in HEAVY - {"numpy"}}


def test_every_extra_for_users_is_documented() -> None:
    (section,) = re.findall(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", text("pyproject.toml"), re.MULTILINE | re.DOTALL
    )
    extras = set(re.findall(r"^([\w-]+) = ", section, re.MULTILINE))
    internal = {"dev", "docs", "neighbours", "test"}
    (table,) = re.findall(r"\|extra\|purpose\|\n(.*?)\n\n", text("docs/installing.md"), re.DOTALL)
    rows = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(.*?)`", row)} == extras - internal


def test_the_citation_is_valid_and_of_this_version() -> None:
    path = ROOT / "CITATION.cff"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    found = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    citation = load("CITATION.cff")
    assert citation["version"] == pytest_llenergy.__version__
    assert f'license = "{citation["license"]}"' in text("pyproject.toml")


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+) \((unreleased|20\d\d-\d\d-\d\d)\)$", text("CHANGELOG.md"), re.MULTILINE)
    assert first is not None
    assert first[1] == pytest_llenergy.__version__


def test_commits_are_formatted_by_the_ruff_that_is_tested() -> None:
    (ruff,) = [repo for repo in load(".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"]]
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in text("constraints.txt").split()


@pytest.mark.parametrize("name", ["bench", "tests"])
def test_contributing_has_the_commands_of_the_readme(name: str) -> None:
    assert f"pip install tox && tox run -e {name}" in text("CONTRIBUTING.md")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_links_to_files_lead_to_existing_files(name: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text(name))
    assert [link for link in links if not (ROOT / link).exists()] == []
