# SPDX-License-Identifier: Apache-2.0
"""``--energy-save=NAME`` loses no test of NAME unless it is gone from the code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..docs.project import QUICK, set_up

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


#: Options that select, and how many of the five tests they leave out.
SELECTIONS = {
    "-k one": 4,
    "-k one -n 2": 4,
    "test_first.py": 1,
    "test_first.py::TestIt test_second.py": 3,
    "test_first.py::test_two[1] test_second.py": 3,
    "--deselect=test_first.py::test_two[2]": 1,
}


def test_a_selection_is_refused_before_it_measures(saved: pytest.Pytester) -> None:
    before = Path(".llenergy/main.json").read_bytes()
    for options, left_out in SELECTIONS.items():
        result = save(saved, "-q", *options.split())
        assert result.ret == pytest.ExitCode.USAGE_ERROR, options
        (line,) = [each for each in result.stderr.lines if each.startswith("ERROR: ")]
        assert line.startswith(
            f"ERROR: --energy-save=main: this run leaves out {left_out} of 5 tests of "
            ".llenergy/main.json, such as test_"
        )
        assert line.endswith("; select them too, save under another name, or delete the file")
        result.stdout.no_fnmatch_line("*energy report*")
    assert Path(".llenergy/main.json").read_bytes() == before


def test_the_last_failed_tests_are_a_selection(
    saved: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "fail")
    saved.runpytest("--energy-meter=ten-watts").assert_outcomes(passed=3, failed=2)
    assert save(saved, "--lf").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_tests_that_are_gone_are_dropped(saved: pytest.Pytester, options: Sequence[str]) -> None:
    (saved.path / "test_second.py").unlink()
    source = FIRST.replace("test_one", "test_new").replace("[1, 2]", "[2]").replace("test_three", "test_3")
    saved.makepyfile(test_first=source)
    save(saved, *options).assert_outcomes(passed=3)
    assert names() == ["test_3", "test_new", "test_two[2]"]


@pytest.mark.parametrize(
    ("how", "options", "lost"),
    [("fail", [], 2), ("skip", [], 2), ("fail", ["-x"], 4), ("interrupt", [], 4), ("fail", ["-n", "2"], 2)],
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


def test_a_selection_with_a_name_from_an_ini_file_lies_beside(saved: pytest.Pytester) -> None:
    with (saved.path / "tox.ini").open("a") as ini:
        ini.write("\nenergy_save = main\n")
    saved.runpytest("--energy-meter=ten-watts", "-k", "one").assert_outcomes(passed=1, deselected=4)
    (beside,) = Path(".llenergy").glob("main.*.json")
    assert (names(), names(beside.name)) == (ALL, ["test_one"])


def test_another_backend_than_in_the_file_is_a_selection(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    set_up(pytester, monkeypatch)
    options = ["benchmarks", *QUICK.split(), "--energy-save=own"]
    pytester.runpytest(*options).assert_outcomes(passed=1)
    others = [each.replace("tiny", "transformers", each.startswith("--energy-backend")) for each in options]
    result = pytester.runpytest(*others)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *leaves out 1 of 1 test of*such as *test_decode[[]tiny-1]; *"])


def test_a_file_that_is_no_report_is_not_replaced(quick: pytest.Pytester) -> None:
    (quick.mkdir(".llenergy") / "main.json").write_text("notes")
    result = save(quick)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --energy-save=main: *main.json*; save under another name, or delete the file"]
    )
