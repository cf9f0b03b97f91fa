# SPDX-License-Identifier: Apache-2.0
"""The documentation matches the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_llenergy.cli.compare import FORMATS

from .test_import_rule import ALLOWED

ROOT = Path(__file__).parent.parent


def test_every_output_format_is_documented() -> None:
    comparing = (ROOT / "docs" / "comparing.md").read_text()
    # Text is the default.
    assert [form for form in FORMATS if f"--format {form}" not in comparing] == ["text"]


def test_the_architecture_page_lists_all_rooms() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\|(`[^|]+)\|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == ALLOWED.keys()


def test_the_readme_names_tox_environments_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    tox = (ROOT / "tox.ini").read_text()
    for name in ("bench", "tests"):
        assert f"pip install tox && tox run -e {name}" in readme
    assert "[testenv:bench]" in tox
    assert "[testenv:tests{,-all}]" in tox
    assert "tox run -e tests-all" in readme


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_nothing_twice(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        rows = re.findall(r"^\| ?(`[^|]+)\|", section, re.MULTILINE)
        assert len(rows) == len(set(rows)), rows
    headings = re.findall(r"^#+ .*", text, re.MULTILINE)
    assert len(headings) == len(set(headings)), headings
