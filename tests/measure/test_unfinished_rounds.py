# SPDX-License-Identifier: Apache-2.0
"""What is kept of a measurement whose work fails in a later round: its rounds, and never as a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from ..ranks.no_torch import without_torch

ReadReport = Callable[..., dict[str, Any]]

OPTIONS = ["--energy-report", "--energy-rounds=4", "-p", "no:cacheprovider"]

#: Rank 1 dies in the third round, and the next test reads the journal of the run.
RANK_DIES = """
import os, time
from pathlib import Path
import pytest

def step():
    rounds = Path(f"rounds-{os.environ['RANK']}")
    with rounds.open("a") as file:
        file.write("x")
    time.sleep(0.1)
    if len(rounds.read_text()) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)

@pytest.mark.gpus(2, fallback="cpu")
def test_dies(workers, energy):
    energy(workers.call(step))

def test_journal():
    (journal,) = Path().glob("*.journal.jsonl")
    Path("journal.txt").write_text(journal.read_text())
"""

#: A function in pytest's own process.
IN_PROCESS = """
import time
import pytest

calls = []

def work():
    time.sleep(0.1)
    calls.append(0)
    if len(calls) == 3:
        raise ValueError("no more")
    return len(calls)

def test_fails(energy):
    energy(work)

def test_expects_the_error(energy):
    calls.clear()
    with pytest.raises(ValueError):
        energy(work)

def test_measures_again(energy):
    calls.clear()
    with pytest.raises(ValueError):
        energy(work)
    energy(work)

def test_has_a_window_too(energy, energy_meter):
    calls.clear()
    with pytest.raises(ValueError):
        energy(work)
    with energy_meter("good"):
        time.sleep(0.1)

def test_has_an_invalid_window(energy, energy_meter):
    calls.clear()
    with pytest.raises(ValueError):
        energy(work)
    with energy_meter("short"):
        pass

def test_fails_again_and_again(energy):
    for rounds_before in (0, 2, 0):
        calls[:] = [0] * (2 - rounds_before)
        with pytest.raises(ValueError):
            energy(work)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def work_until_it_cannot_be_shown():
    time.sleep(0.1)
    calls.append(0)
    if len(calls) == 3:
        raise Mute

def test_expects_an_error_without_text(energy):
    calls.clear()
    with pytest.raises(Mute):
        energy(work_until_it_cannot_be_shown)

def work_until_it_skips():
    time.sleep(0.1)
    calls.append(0)
    if len(calls) == 3:
        pytest.skip("enough")

def test_skips(energy):
    calls.clear()
    energy(work_until_it_skips)
"""


#: Meters that fail after the work has failed.
METERS_FAIL = """
import time
import pytest
from pytest_llenergy.measure.local_meters import LocalMeters

calls = []

def work():
    time.sleep(0.1)
    calls.append(0)
    if len(calls) == 3:
        raise ValueError("no more " + 400 * "x")

def fail(*_, **__):
    raise RuntimeError("the meter is gone")

@pytest.fixture(autouse=True)
def begin():
    calls.clear()

@pytest.fixture
def unread(monkeypatch):
    account = LocalMeters.account
    def account_unless_failed(self, measured, **trial):
        return (account if measured.failure is None else fail)(self, measured, **trial)
    monkeypatch.setattr(LocalMeters, "account", account_unless_failed)

def test_third_round(energy, unread):
    energy(work)
"""


def require_unfinished(rounds: list[dict[str, Any]], detail: str) -> None:
    """Require two finished rounds with joules, and one that failed."""
    invalid = [
        [(flag["name"], flag["detail"]) for flag in each["flags"] if flag["severity"] == "invalid"]
        for each in rounds
    ]
    assert [[name for name, _ in each] for each in invalid] == [[], [], ["unfinished"]]
    assert detail in invalid[2][0][1]
    for each in rounds:
        assert each["energy_j"] > 0
        assert each["by_domain"]
        assert each["duration_s"] >= 0.1


def test_a_rank_that_dies_in_the_third_round(quick: pytest.Pytester, read_report: ReadReport) -> None:
    quick.makepyfile(RANK_DIES)
    without_torch(quick.path)
    done = quick.runpytest_subprocess(*OPTIONS)
    done.assert_outcomes(failed=1, passed=1)
    record = next(each for each in read_report()["records"] if "test_dies" in each["id"])
    assert record["status"] == "failed"
    assert "was killed by SIGKILL" in record["reason"]
    require_unfinished(record["rounds"], "was killed by SIGKILL")
    assert record["metrics"]["energy_j"]["n"] == 2
    assert record["meters"]
    lines = (quick.path / "journal.txt").read_text().splitlines()
    assert [each for each in map(json.loads, lines) if each.get("id") == record["id"]] == [record]


@pytest.mark.slow
def test_a_function_that_fails_in_the_third_round(quick: pytest.Pytester, read_report: ReadReport) -> None:
    """A gate compares none of its rounds, even if the test expects the error."""
    quick.makepyfile(IN_PROCESS)
    # A target that nothing meets.
    done = quick.runpytest(*OPTIONS, "--energy-target=0.0001%")
    done.assert_outcomes(failed=4, passed=3, skipped=1)
    records = {each["id"].partition("::")[2]: each for each in read_report()["records"]}
    for name in ("test_fails", "test_expects_the_error"):
        assert records[name]["status"] == "failed"
        require_unfinished(records[name]["rounds"], "the work failed: ValueError: no more")
        assert "imprecise" not in [flag["name"] for flag in records[name]["flags"]]
    # The longest of several that failed.
    require_unfinished(records["test_fails_again_and_again"]["rounds"], "ValueError: no more")
    again = records["test_measures_again"]
    assert again["status"] == "measured"
    assert len(again["rounds"]) == 4
    assert "imprecise" in [flag["name"] for flag in again["flags"]]
    assert "invalid" not in [flag["severity"] for each in again["rounds"] for flag in each["flags"]]
    window = records["test_has_a_window_too"]
    assert (window["status"], window["rounds"], len(window["windows"])) == ("measured", [], 1)
    invalid = records["test_has_an_invalid_window"]
    # Its status is that of its window, so that rounds of a measurement that failed would count in an A/B run.
    assert (invalid["status"], invalid["rounds"]) == ("invalid", [])
    mute = records["test_expects_an_error_without_text"]
    assert "measured nothing" in mute["reason"]
    require_unfinished(mute["rounds"], "the work failed: Mute")
    skipped = records["test_skips"]
    assert (skipped["status"], skipped["reason"]) == ("skipped", "enough")
    require_unfinished(skipped["rounds"], "the work failed: Skipped: enough")
    done.stdout.re_match_lines([r"test_fails \(failed\) .*J .*", r"test_skips \(skipped\) .*J .*"])


def test_meters_that_fail_too_lose_no_round(quick: pytest.Pytester, read_report: ReadReport) -> None:
    quick.makepyfile(METERS_FAIL)
    done = quick.runpytest("-v", *OPTIONS)
    done.assert_outcomes(failed=1)
    done.stdout.no_fnmatch_line("*INTERNALERROR*")
    (record,) = read_report()["records"]
    assert record["reason"].startswith("ValueError: no more")
    # The round that failed has no energy; those before it have.
    assert [each["energy_j"] > 0 for each in record["rounds"]] == [True, True]
    assert record["metrics"]["energy_j"]["n"] == 2


def test_a_gate_compares_no_rounds_of_a_measurement_that_failed(
    quick: pytest.Pytester, read_report: ReadReport
) -> None:
    """The same test as in the baseline, but for its work that fails now."""
    source = (
        "import os, time\n"
        "calls = []\n"
        "def work():\n"
        "    time.sleep(0.1)\n"
        "    calls.append(0)\n"
        "    if 'FAILS' in os.environ and len(calls) == 3:\n"
        "        raise ValueError\n"
        "def test_it(energy):\n"
        "    energy(work)\n"
    )
    quick.makepyfile(source)
    quick.runpytest(*OPTIONS).assert_outcomes(passed=1)
    base = read_report()["records"][0]
    assert base["status"] == "measured"
    (quick.path / "energy.json").rename(quick.path / "base.json")
    gate = ["--energy-compare=base.json", "--energy-fail-on=energy_j:200%"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILS", "1")
        quick.runpytest(*OPTIONS, *gate).assert_outcomes(failed=1)
    (head,) = read_report()["records"]
    require_unfinished(head["rounds"], "the work failed: ValueError")
    assert head["comparisons"] == []
    compared = subprocess.run(
        [sys.executable, "-m", "pytest_llenergy.cli", "compare", "base.json", "energy.json"],
        cwd=quick.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unchanged" not in compared.stdout, compared.stdout
    assert "failed" in compared.stdout, compared.stdout


def test_ctrl_c_keeps_the_rounds(quick: pytest.Pytester, read_report: ReadReport) -> None:
    quick.makepyfile(
        "import time\n"
        "calls = []\n"
        "def work():\n"
        "    calls.append(0)\n"
        "    time.sleep(0.1)\n"
        "    if len(calls) == 3:\n"
        "        print('third', flush=True)\n"
        "        time.sleep(60)\n"
        "def test_it(energy):\n"
        "    energy(work)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", *OPTIONS],
        cwd=quick.path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "third" in line:
                break
        time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
        run.communicate(timeout=60)
    (record,) = read_report()["records"]
    assert (record["status"], record["reason"]) == ("failed", "interrupted before all rounds were measured")
    assert [each["energy_j"] > 0 for each in record["rounds"]] == [True, True]
