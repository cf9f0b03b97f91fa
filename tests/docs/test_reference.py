# SPDX-License-Identifier: Apache-2.0
"""Pages of reference are made of the code, and name all of it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from pytest_llenergy.cli import COMMANDS
from pytest_llenergy.hookspecs import pytest_llenergy_meters
from pytest_llenergy.marks import MARKS
from pytest_llenergy.measure.metrics import FIGURES
from pytest_llenergy.model.report import Report
from pytest_llenergy.options import OPTIONS

from .pages import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script beside the documentation."""
    monkeypatch.syspath_prepend(DOCS)
    return import_module("reference")


def test_the_pages_are_what_the_code_says_now(reference: Any) -> None:
    found = [path.name for path in reference.stale()]
    assert not found, f"{found}: the code says something else now: run python docs/reference.py"


def test_every_option_is_named_with_its_default() -> None:
    rows = (DOCS / "options.md").read_text().splitlines()
    for option in OPTIONS:
        (row,) = [row for row in rows if f"| `{option.ini}` |" in row]
        _, flag, _, default, text, *_ = (cell.strip() for cell in row.split("|"))
        assert default == (f"`{option.default}`" if option.default else "none")
        assert option.flag in flag
        assert text


def test_every_mark_fixture_command_hook_and_metric_is_named() -> None:
    fixtures = (REFERENCE / "fixtures.md").read_text()
    assert titles("marks.md", 2) == [mark.__name__ for mark in MARKS]
    assert {"energy", "energy_meter", "backend", "gpus", "workers", "prompts"} < set(titles("fixtures.md", 3))
    assert {"Run", "Window"} < set(titles("fixtures.md", 3))
    assert [name for name in FIGURES if f"| `{name}` |" not in fixtures] == []
    assert pytest_llenergy_meters.__name__ in titles("hooks.md", 2)
    assert len(titles("commands.md", 2)) == len(COMMANDS)
    fields = set(re.findall(r"^\| `(\w+)` \|", (REFERENCE / "schema.md").read_text(), re.MULTILINE))
    assert set(Report.__struct_fields__) <= fields


def test_a_word_of_the_code_that_changes_is_seen(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("describe.options")
    monkeypatch.setattr(OPTIONS[0], "help", "Something else.")
    assert [path.name for path in reference.stale()] == ["options.md"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the model's name in the server's API", "the model's name in the server's API"),
        ("with 'serve -m {model}'; no shell", "with `serve -m {model}`; no shell"),
        ("as --energy-sort of pytest", "as `--energy-sort` of pytest"),
    ],
)
def test_commands_are_code_and_apostrophes_stay(reference: Any, text: str, shown: str) -> None:
    assert import_module("describe.text").help_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("what may differ (default: 1%)", ("what may differ", "1%")),
        ("(default: one, or two; repeatable)", ("(repeatable)", "one, or two")),
        ("one test (repeatable; default: all)", ("one test (repeatable)", "all")),
        ("that of now (default: HEAD); . is the tree", ("that of now; . is the tree", "HEAD")),
        ("reports (.json)", ("reports (.json)", "")),
    ],
)
def test_defaults_stand_in_their_column(reference: Any, text: str, shown: tuple[str, str]) -> None:
    assert import_module("describe.commands").without_default(text) == shown


def test_every_argument_of_a_command_is_told_as_a_sentence_begins() -> None:
    for row in re.findall(r"^\| `.*$", (REFERENCE / "commands.md").read_text(), re.MULTILINE):
        _, _, text, *_ = (cell.strip() for cell in row.split("|"))
        assert re.match(r"[A-Z`]", text), row
        assert "default:" not in row, row


def titles(name: str, level: int) -> list[str]:
    """Headings of a page of reference."""
    return re.findall(rf"^{'#' * level} (.+)$", (REFERENCE / name).read_text(), re.MULTILINE)
