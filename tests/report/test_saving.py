# SPDX-License-Identifier: Apache-2.0
"""``--energy-save=NAME`` loses no test of NAME unless its file is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

FIRST = """
import os, time, pytest

def test_one(energy): energy(time.sleep, 0.02)

@pytest.mark.parametrize("n", [1, 2])
def test_two(energy, n):
    if os.environ.get("HOW") == "interrupt": raise KeyboardInterrupt
    if os.environ.get("HOW") == "skip": pytest.skip("no device")
    energy(time.sleep, 0.02)
    assert os.environ.get("HOW") != "fail"

class TestIt:
    def test_three(self, energy): energy(time.sleep, 0.02)
"""

SECOND = """
import time, unittest, pytest

class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def give(self, energy): self.energy = energy
    def test_four(self): self.energy(time.sleep, 0.02)
"""

ALL = ["test_four", "test_one", "test_three", "test_two[1]", "test_two[2]"]


@pytest.fixture
def saved(few_plugins: None, quick: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester with two files and the report ``main`` of their five tests."""
    quick.makepyfile(test_first=FIRST, test_second=SECOND)
    quick.runpytest("--energy-save=main", "--energy-meter=ten-watts").assert_outcomes(passed=5)
    return quick


def names(path: str = "main.json") -> list[str]:
    report = json.loads((Path(".llenergy") / path).read_text())
    return sorted(each["id"].rpartition("::")[2] for each in report["records"])


def save(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    options = ("--energy-save=main", "--energy-meter=ten-watts", *options)
    return pytester.runpytest(*options, no_reraise_ctrlc=True)


@pytest.mark.slow
def test_tests_whose_file_is_gone_are_dropped(saved: pytest.Pytester) -> None:
    (saved.path / "test_second.py").unlink()
    save(saved).assert_outcomes(passed=4)
    assert names() == ALL[1:]


@pytest.mark.parametrize(
    ("how", "options", "lost"),
    [
        ("fail", [], 2),
        pytest.param("skip", ["-n", "2"], 2, marks=pytest.mark.slow),
        ("interrupt", [], 4),
        ("pass", ["-k", "one"], 4),
        pytest.param("pass", ["test_first.py::test_one", "test_second.py"], 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_measured_less_lies_beside(
    saved: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: str, options: Sequence[str], lost: int
) -> None:
    before = Path(".llenergy/main.json").read_bytes()
    monkeypatch.setenv("HOW", how)
    result = save(saved, *options)
    assert Path(".llenergy/main.json").read_bytes() == before
    (beside,) = Path(".llenergy").glob("main.*.json")
    assert "test_one" in names(beside.name)
    result.stdout.fnmatch_lines(
        [
            f"energy: this run has not measured {lost} of 5 tests of .llenergy/main.json, such as test_*: "
            f"that file stays, and this run's report is {beside.name} beside it; to drop these tests, delete "
            "the file and run again",
            f"energy report: .llenergy/{beside.name}",
        ]
    )


def test_a_file_that_is_no_report_is_not_replaced(quick: pytest.Pytester) -> None:
    (quick.mkdir(".llenergy") / "main.json").write_text("notes")
    result = save(quick)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --energy-save=main: *main.json*; save under another name, or delete the file"]
    )
