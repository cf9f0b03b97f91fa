# SPDX-License-Identifier: Apache-2.0
"""Characters of the tables that an encoding lacks become ASCII of the same width."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_llenergy.record.text import encodable

ROOT = Path(__file__).parents[2]

#: Source of a conftest whose measurements are the same on every machine, however busy.
CONFTEST = """
import os
import pytest_llenergy.plugin.handles.energy
from tests.plugin.inner import fake_measure

os.environ.update(WATTS="10", KIND="measured")
pytest_llenergy.plugin.handles.energy.measure_on_hosts = fake_measure
"""

SUITE = """
import time, pytest
@pytest.mark.parametrize("size", [1, "ł"])
def test_it(energy, size):
    energy(time.sleep, 0.05)
"""


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("ascii", "1.0+/-0.1 +3.1%...+6.0% ---- a~b 41 C \\u0142"),
        ("latin-1", "1.0 ± 0.1 +3.1%...+6.0% ---- a~b 41°C \\u0142"),
        ("utf-8", "1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł"),
    ],
)
def test_only_characters_that_the_encoding_lacks_are_replaced(encoding: str, message: str) -> None:
    assert encodable("1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł", encoding) == message


@pytest.mark.parametrize(
    ("encoding", "u", "limits", "rule"),
    [("ascii", "energy+/-u", "...", "-"), ("utf-8", "energy ± u", " … ", "─")],
)
@pytest.mark.slow
def test_tables_of_a_run_and_of_the_commands_keep_all_rows_in_every_encoding(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    u: str,
    limits: str,
    rule: str,
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_x=SUITE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("COLUMNS", "80")
    python = [sys.executable, "-m"]
    options = ["-p", "no:cacheprovider", "--energy-rounds=4", "--energy-report"]
    assert pytester.run(*python, "pytest", *options, "--energy-save=x").ret == 0
    head = pytester.run(*python, "pytest", *options, "--energy-compare=x").outlines
    report = pytester.run(*python, "pytest_llenergy.cli", "report", "energy.json").outlines
    command = [*python, "pytest_llenergy.cli", "compare", ".llenergy/x.json", "energy.json"]
    comparison = pytester.run(*command).outlines
    for lines in (head, report):
        header, line, *rows = lines[find_line(lines, "test ") :]
        assert u in header
        assert set(line.strip()) == {rule}
        assert [row.strip()[:5] for row in rows[:3]] == ["test_", "size=", "size="]
    for lines in (head, comparison):
        _, line, *rows = lines[find_line(lines, "verdict ") :]
        assert set(line.strip()) == {rule}
        assert len([row for row in rows if row.startswith("unchanged ") and limits in row]) == 2
        assert max(map(len, rows)) <= 80


def find_line(lines: list[str], start: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(start))


def test_microjoules_are_readable_in_ascii() -> None:
    assert encodable("40 ± 23 µJ", "ascii") == "40+/-23 uJ"
