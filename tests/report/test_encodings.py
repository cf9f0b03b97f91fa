# SPDX-License-Identifier: Apache-2.0
"""Where an encoding lacks the signs of the tables, they are ASCII, and every column stays where it is."""

from __future__ import annotations

import sys

import pytest

from pytest_llenergy.model.text import encodable

SUITE = """
import time, pytest
@pytest.mark.parametrize("size", [1, "ł"])
def test_it(energy, size):
    energy(time.sleep, 0.05)
"""


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("ascii", "1.0+/-0.1 +3.1%...+6.0% ---- a~b 41 C \\u0142"),
        ("latin-1", "1.0 ± 0.1 +3.1%...+6.0% ---- a~b 41°C \\u0142"),
        ("utf-8", "1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł"),
    ],
)
def test_only_characters_that_the_encoding_lacks_are_replaced(encoding: str, told: str) -> None:
    assert encodable("1.0 ± 0.1 +3.1% … +6.0% ──── a…b 41°C ł", encoding) == told


@pytest.mark.parametrize(
    ("encoding", "u", "limits", "rule"), [("ascii", "J+/-u", "...", "-"), ("utf-8", "J ± u", " … ", "─")]
)
def test_a_run_and_the_command_lose_no_line(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, encoding: str, u: str, limits: str, rule: str
) -> None:
    quick.makepyfile(test_x=SUITE)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("COLUMNS", "80")
    python = [sys.executable, "-m"]
    options = ["-p", "no:cacheprovider", "--energy-rounds=4", "--energy-report"]
    assert quick.run(*python, "pytest", *options, "--energy-save=x").ret == 0
    again = quick.run(*python, "pytest", *options, "--energy-compare=x").outlines
    alone = quick.run(*python, "pytest_llenergy.cli", "report", "energy.json").outlines
    apart = quick.run(*python, "pytest_llenergy.cli", "compare", ".llenergy/x.json", "energy.json").outlines
    for lines in (again, alone):
        above, line, *rows = lines[beginning(lines, "test ") :]
        assert u in above
        assert set(line.strip()) == {rule}
        assert [
            row.startswith("test_it size=") and row.rstrip().endswith("ten-watts") for row in rows[:2]
        ] == [True] * 2
    for lines in (again, apart):
        _, line, *rows = lines[beginning(lines, "verdict ") :]
        assert set(line.strip()) == {rule}
        assert [limits in row for row in rows[:2]] == [True] * 2
        assert max(map(len, rows)) <= 80


def beginning(lines: list[str], start: str) -> int:
    return next(number for number, line in enumerate(lines) if line.startswith(start))
