# SPDX-License-Identifier: Apache-2.0
"""The reference pages are generated from the code and are complete."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.cli import COMMANDS
from pytest_llenergy.cli.doctor.capabilities import list_facts
from pytest_llenergy.hookspecs import pytest_llenergy_meters
from pytest_llenergy.options.table import OPTIONS
from pytest_llenergy.plugin.marks import MARKS
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.report import Report

from .pages import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that generates the pages."""
    monkeypatch.syspath_prepend(DOCS)
    return import_module("reference")


def test_the_generated_pages_are_up_to_date(reference: Any) -> None:
    found = [path.name for path in reference.stale()]
    assert not found, f"{found}: out of date; run python docs/reference.py"


def test_every_option_is_listed_with_its_default() -> None:
    rows = (DOCS / "options.md").read_text().splitlines()
    for option in OPTIONS:
        (row,) = [row for row in rows if f"|`{option.ini}`|" in row]
        _, flag, _, default, text, *_ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert default == (f"`{option.default}`" if option.default else "none")
        assert option.flag in flag
        assert text


def test_every_mark_fixture_command_hook_field_and_metric_is_listed() -> None:
    assert titles("marks.md", 2) == [mark.__name__ for mark in MARKS]
    assert {"energy", "energy_meter", "backend", "gpus", "workers", "prompts"} < set(titles("fixtures.md", 3))
    assert {"Run", "Window"} < set(titles("fixtures.md", 3))
    assert [name for name in ROUND_METRICS if f"`{name}`" not in (DOCS / "numbers.md").read_text()] == []
    assert pytest_llenergy_meters.__name__ in titles("hooks.md", 2)
    assert len(titles("commands.md", 2)) == len(COMMANDS)
    fields = set(re.findall(r"^\|`(\w+)`\|", (REFERENCE / "schema.md").read_text(), re.MULTILINE))
    assert set(Report.__struct_fields__) <= fields


def test_the_page_of_words_counts_them() -> None:
    intro = (DOCS / "options.md").read_text().partition("\n## ")[0]
    rows = (DOCS / "numbers.md").read_text().partition("\n## Flags\n")[2].splitlines()
    flags = [name for row in rows if row.startswith("|`") for name in row.split("|")[1].split(", ")]
    assert [*map(int, re.findall(r"\d+", intro))] == [len(OPTIONS), len(MARKS), len(COMMANDS), len(flags)]


def test_a_changed_help_text_makes_its_page_stale(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(OPTIONS[0], help="Something else.")
    monkeypatch.setattr(import_module("describe.options"), "OPTIONS", (changed, *OPTIONS[1:]))
    assert DOCS / "options.md" in reference.stale()


def test_the_page_of_backends_has_every_fact_of_a_backend_once(reference: Any) -> None:
    backends = import_module("describe.backends")
    row = Capabilities(options=("one | two",))
    page = backends.backends_page([BackendSpec("mine", "m:M", (), "pip install mine", row)])
    assert "|mine|`pip install mine`|" in page
    assert "|mine|one \\| two|none|" in page
    shown = [name for names in backends.TABLES.values() for name in names]
    assert sorted(shown) == sorted(fact.name for fact in list_facts(row))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the model's name in the server's API", "the model's name in the server's API"),
        ("with 'serve -m {model}'; no shell", "with `serve -m {model}`; no shell"),
        ("as --energy-columns of pytest", "as `--energy-columns` of pytest"),
    ],
)
def test_commands_become_code_and_apostrophes_stay(reference: Any, text: str, shown: str) -> None:
    assert import_module("describe.text").help_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("what may differ (default: 1%)", ("what may differ", "1%")),
        ("(default: one, or two; repeatable)", ("(repeatable)", "one, or two")),
        ("one test (repeatable; default: all)", ("one test (repeatable)", "all")),
        ("the head (default: HEAD); . is the tree", ("the head; . is the tree", "HEAD")),
        ("reports (.json)", ("reports (.json)", "")),
    ],
)
def test_defaults_move_to_their_column(reference: Any, text: str, shown: tuple[str, str]) -> None:
    assert import_module("describe.commands").without_default(text) == shown


DOCSTRING = """Run it.

    Args:
        work: A callable, called
            several times.
        timeout_s: Seconds.

    Returns:
        The results by rank.

    Raises:
        WorkerError: A rank failed.
    """


def test_sections_of_docstrings_become_lists_or_sentences(reference: Any) -> None:
    prose = import_module("describe.text").prose
    assert prose(DOCSTRING) == (
        "Run it.\n\n- `work`: A callable, called several times.\n- `timeout_s`: Seconds.\n\n"
        "Returns the results by rank.\n\n- Raises `WorkerError`: A rank failed."
    )
    assert " ".join(prose(DOCSTRING, inline=True).split()) == (
        "Run it. `work`: A callable, called several times. `timeout_s`: Seconds. "
        "Returns the results by rank. Raises `WorkerError`: A rank failed."
    )


def test_descriptions_of_arguments_begin_with_a_capital_or_code() -> None:
    for row in re.findall(r"^\|`.*$", (REFERENCE / "commands.md").read_text(), re.MULTILINE):
        _, _, text, *_ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert re.match(r"[A-Z`]", text), row
        assert "default:" not in row, row


def titles(name: str, level: int) -> list[str]:
    """Return the headings of a reference page."""
    return re.findall(rf"^{'#' * level} (.+)$", (REFERENCE / name).read_text(), re.MULTILINE)
