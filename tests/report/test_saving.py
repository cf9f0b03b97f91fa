# SPDX-License-Identifier: Apache-2.0
"""``--energy-save=NAME`` loses no test of NAME that still exists, and keeps none that does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..conftest import TEN_WATTS

FIRST = """
import os, time, pytest
if os.environ.get("HOW") == "skip file": pytest.skip("no device", allow_module_level=True)

def test_one(energy): energy(time.sleep, 0.02)

@pytest.mark.parametrize("n", [1, 2] if os.environ.get("HOW") != "parameter" else [1])
def test_two(energy, n):
    if os.environ.get("HOW") == "interrupt": raise KeyboardInterrupt
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

BACKENDS = """
import time
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def run(self): time.sleep(0.02)
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=1, output_tokens=1)]
        return Generation(texts=["a"], token_ids=[[1]], requests=requests)

class Own:
    def load(self, model, options, context): return BackendInfo(name="own", version="1", model=model.label)
    def prepare(self, prompts, params): return Job()
    def synchronize(self): pass
    def close(self): pass

def pytest_llenergy_backends(config):
    return [BackendSpec(name, "conftest:Own", (), "", Capabilities()) for name in ("one", "two")]
"""

ALL = ["test_four", "test_one", "test_three", "test_two[1]", "test_two[2]"]


#: The report ``main``, which is measured once.
MAIN: list[bytes] = []


@pytest.fixture
def saved(few_plugins: None, quick: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester with two files and the report ``main`` of their five tests."""
    quick.makepyfile(test_first=FIRST, test_second=SECOND)
    path = quick.path / ".llenergy" / "main.json"
    if not MAIN:
        quick.runpytest("--energy-save=main", "--energy-meter=ten-watts").assert_outcomes(passed=5)
        MAIN.append(path.read_bytes())
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(MAIN[0])
    return quick


def names(path: str = "main.json") -> list[str]:
    report = json.loads((Path(".llenergy") / path).read_text())
    return sorted(each["id"].rpartition("::")[2] for each in report["records"])


def save(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    options = ("--energy-save=main", "--energy-meter=ten-watts", *options)
    return pytester.runpytest(*options, no_reraise_ctrlc=True)


def test_tests_that_are_gone_are_dropped(saved: pytest.Pytester) -> None:
    (saved.path / "test_second.py").unlink()
    saved.makepyfile(test_first=FIRST.partition("class TestIt")[0])
    result = save(saved, "-n", "2")
    result.assert_outcomes(passed=3)
    assert "no longer there, and dropped: " in result.stdout.str()
    assert names() == ["test_one", "test_two[1]", "test_two[2]"]


@pytest.mark.parametrize(
    ("how", "options", "lost"),
    [
        ("fail", [], 2),
        ("skip file", [], 4),
        ("interrupt", [], 4),
        ("parameter", [], 1),
        ("pass", ["-n", "2", "-k", "one"], 4),
    ],
)
def test_a_run_that_measured_less_lies_beside(
    saved: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: str, options: Sequence[str], lost: int
) -> None:
    before = Path(".llenergy/main.json").read_bytes()
    monkeypatch.setenv("HOW", how)
    result = save(saved, *options)
    assert Path(".llenergy/main.json").read_bytes() == before
    assert len(names("main.partial.json")) >= 5 - lost
    result.stdout.fnmatch_lines(
        [
            f"energy: this run has not measured {lost} of 5 tests of .llenergy/main.json, such as test_*: "
            "that file stays, and this run's report is main.partial.json beside it; to drop these tests, "
            "delete the file and run again",
            "energy report: .llenergy/main.partial.json",
        ]
    )


def test_tests_of_backends_that_are_not_selected_stay(quick: pytest.Pytester) -> None:
    quick.makeconftest(f"{TEN_WATTS}\n{BACKENDS}")
    source = "def test_{}(energy, backend):\n    energy(backend.generate, ['a'])\n"
    quick.makepyfile(source.format("it") + source.format("gone"))
    save(quick, "--energy-backend=one,two").assert_outcomes(passed=4)
    quick.makepyfile(source.format("it"))
    save(quick, "--energy-backend=one").assert_outcomes(passed=1)
    assert (len(names()), names("main.partial.json")) == (4, ["test_it[one]"])
    save(quick, "--energy-backend=one,two").assert_outcomes(passed=2)
    assert names() == ["test_it[one]", "test_it[two]"]


def test_a_file_that_is_no_report_is_not_replaced(quick: pytest.Pytester) -> None:
    (quick.mkdir(".llenergy") / "main.json").write_text("notes")
    result = save(quick)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --energy-save=main: *main.json*; save under another name, or delete the file"]
    )
