# SPDX-License-Identifier: Apache-2.0
"""What had been measured is kept, whatever ends the run."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import jsonschema
import pytest

from .project import Project, wait_for
from .test_record import schema

THREE = """
import pathlib, time

def test_one(energy):
    energy(time.sleep, 0.02)

def test_two(energy):
    energy(time.sleep, 0.02)

def endless():
    pathlib.Path("third").touch()
    time.sleep(600)

def test_three(energy):
    energy(endless)
"""


@pytest.fixture
def three(project: Project) -> Project:
    project.write("test_three.py", THREE)
    return project


def stop(project: Project, number: signal.Signals, *args: str) -> int:
    """Start a run with two measured tests, end it by a signal in the third, and return the exit code."""
    process = project.start_pytest("--energy-report", project.meter(), *args)

    wait_for(lambda: project.exists("third"))
    # Each test has its line before the next one begins.
    (journal,) = project.path.glob("energy.*.journal.jsonl")
    assert journal.read_text().count('"id":"test_three.py') == 2
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    process.communicate(timeout=200)
    return process.returncode


def test_ctrl_c_writes_the_report(three: Project) -> None:
    assert stop(three, signal.SIGINT) == pytest.ExitCode.INTERRUPTED
    report = three.report()
    jsonschema.validate(report, schema("report-1"))
    assert (report["run"]["complete"], report["run"]["exit_status"]) == (False, 2)
    records = three.records()
    for name in ("test_one", "test_two"):
        assert records[name]["status"] == "measured"
        assert records[name]["metrics"]["energy_j"]["value"] > 0
    assert not list(three.path.glob("*.jsonl"))


@pytest.mark.parametrize("fixture", ["energy_meter", "energy"])
def test_ctrl_c_keeps_what_the_test_that_it_ends_has_measured(project: Project, fixture: str) -> None:
    project.write(
        "test_windows.py",
        """
import pathlib, time

def test_windows(FIXTURE):
    if hasattr(FIXTURE, "pedantic"):
        FIXTURE(time.sleep, 0.3)
    else:
        with FIXTURE("first"):
            time.sleep(0.3)
    pathlib.Path("third").touch()
    time.sleep(600)
""".replace("FIXTURE", fixture),
    )
    process = project.start_pytest("--energy-report", project.meter())
    wait_for(lambda: project.exists("third"))
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=200)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    record = project.records()["test_windows"]
    if fixture == "energy":
        assert record["reason"] == "interrupted after it was measured"
        assert all(each["energy_j"] > 0 for each in record["rounds"])
        assert record["metrics"]["energy_j"]["value"] > 0
        return
    assert record["reason"] == "interrupted before all windows were measured"
    assert [(window["name"], window["energy_j"] > 0) for window in record["windows"]] == [("first", True)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "term"])
def test_a_kill_leaves_a_journal_that_becomes_a_report(three: Project, number: signal.Signals) -> None:
    stop(three, number)
    assert not three.exists("energy.json")
    (journal,) = three.path.glob("energy.*.journal.jsonl")
    # The last line may be cut off.
    with journal.open("a") as file:
        file.write('{"id":"test_three.py::test_thr')
    merged = three.llenergy("merge", journal.name, "-o", "energy.json")
    assert merged.ret == 0, merged.text
    report = three.report()
    jsonschema.validate(report, schema("report-1"))
    assert report["run"]["complete"] is False
    assert sorted(three.records()) == ["test_one", "test_two"]
    shown = three.llenergy("report", journal.name)
    assert "test_one" in shown.out


def test_a_full_disk_keeps_the_old_report_and_the_journal(project: Project) -> None:
    project.write(
        "conftest.py",
        "import resource, signal\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n",
    )
    project.write("test_it.py", "def test_it(energy): energy(sum, [1])\n")
    project.write("energy.json", "the old report")
    ended = project.pytest("--energy-report", project.meter())
    assert ended.ret == 1
    assert "1 passed" in ended.out
    assert project.text("energy.json") == "the old report"
    (journal,) = project.path.glob("energy.*.journal.jsonl")
    assert journal.name in ended.text
    assert project.llenergy("merge", journal.name, "-o", "saved.json").ret == 0
    assert list(project.records("saved.json")) == ["test_it"]


def test_what_the_journal_of_a_full_disk_lacks_is_in_a_report_elsewhere(project: Project) -> None:
    """The journal's folder takes no more after the first test."""
    project.write("out/.keep", "")
    project.write(
        "conftest.py",
        "import shutil\ndef pytest_runtest_logfinish(nodeid): shutil.rmtree('out', ignore_errors=True)\n",
    )
    project.write("test_it.py", "def test_it(energy): energy(sum, [1])\n")
    ended = project.pytest("--energy-report=out/energy.json", project.meter())
    assert ended.ret == 1
    (elsewhere,) = re.findall(r"it is (\S+) instead", ended.text)
    try:
        assert list(project.records(elsewhere)) == ["test_it"]
    finally:
        pathlib.Path(elsewhere).unlink()


def test_a_failure_that_ends_the_run_is_in_the_report(project: Project) -> None:
    project.write(
        "test_it.py",
        "def test_a(energy):\n    energy(sum, [1])\n    assert 0\ndef test_b(energy): energy(sum, [1])\n",
    )
    ended = project.pytest("-x", "--energy-report", project.meter())
    assert ended.ret in (1, 2)
    assert project.report()["run"]["complete"] is False
    assert {name: each["status"] for name, each in project.records().items()} == {"test_a": "failed"}
