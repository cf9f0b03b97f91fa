# SPDX-License-Identifier: Apache-2.0
"""Exit codes and first lines of pytest and of the ``llenergy`` commands."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .made import at, write_report
from .project import Project, too_long

#: Commands that stay.
COMMANDS = ("run", "watch", "ab", "compare", "report", "merge", "export", "history", "comment", "doctor")

#: Wrong options of pytest, and a word of the line about each.
WRONG = (
    ("--energy-rounds=0", "energy-rounds"),
    ("--energy-target=much", "energy-target"),
    ("--energy-budget=-1", "energy-budget"),
    ("--energy-meter=thermometer", "thermometer"),
    ("--energy-backend=pythia", "pythia"),
    ("--energy-gpus=seven", "seven"),
    ("--energy-report=tests", "tests"),
    ("--energy-isolation=galaxy", "galaxy"),
    ("--energy-floor=much", "energy-floor"),
    ("--energy-columns=energi_j", "energy_j"),
)


@pytest.fixture
def plain(project: Project) -> Project:
    project.write("test_it.py", "def test_it(energy): raise SystemExit('ran')\n")
    return project


def test_a_wrong_option_is_4_and_one_line_before_any_test(plain: Project) -> None:
    (plain.path / "tests").mkdir()
    for option, word in WRONG:
        ended = plain.pytest(option, "--energy-report=x.json" if "report" not in option else "-q")
        assert ended.ret == pytest.ExitCode.USAGE_ERROR, option
        assert "SystemExit" not in ended.out
        errors = [line for line in ended.err.splitlines() if "error" in line.lower()]
        assert len(errors) == 1, ended.err
        assert word in ended.text
        assert not plain.exists("x.json")
    plain.write("pytest.ini", "[pytest]\nenergy_rounds = some\n")
    ended = plain.pytest()
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    assert "energy_rounds" in ended.err
    assert "some" in ended.err


def test_ini_keys_are_defaults_and_the_command_line_wins(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\nenergy_rounds = 3\nenergy_warmup = 0\nenergy_budget = 0.1\n")
    project.write("test_it.py", "import time\ndef test_it(energy): energy(time.sleep, 0.02)\n")
    for options, n in (((), 3), (("--energy-rounds=2",), 2)):
        project.pytest("--energy-report", project.meter(), *options).check(passed=1)
        assert len(project.records()["test_it"]["rounds"]) == n


def test_a_report_of_nothing_is_not_written(project: Project) -> None:
    assert project.pytest("--energy-report").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    project.write("test_it.py", "def test_it(): pass\n")
    ended = project.pytest("--energy-report").check(passed=1)
    assert ended.ret == 0
    assert not project.exists("energy.json")
    assert "no test was measured" in ended.text


def test_collecting_makes_no_folder(plain: Project) -> None:
    ended = plain.pytest("--collect-only", "--energy-report=new/energy.json")
    assert ended.ret == 0
    assert not plain.exists("new")


def test_a_wrong_mark_stops_the_run_under_xdist_too(plain: Project) -> None:
    pytest.importorskip("xdist")
    plain.write("test_bad.py", "import pytest\n@pytest.mark.gpus('x')\ndef test_bad(gpus): pass\n")
    for workers in ((), ("-p", "xdist", "-n2")):
        ended = plain.pytest(*workers)
        assert ended.ret == pytest.ExitCode.INTERRUPTED, ended.text
        assert "@pytest.mark.gpus: n is 'x'" in ended.out
        assert "SystemExit" not in ended.out


def test_every_command_option_and_mark_is_explained(plain: Project) -> None:
    shown = plain.pytest("--help").out
    for option in ("report", "rounds", "meter", "compare", "fail-on", "backend", "model", "gpus"):
        assert f"--energy-{option}" in shown
    marks = plain.pytest("--markers").out
    for mark in ("gpus", "parallel", "energy_options", "backend_options", "energy_gate", "gpu_settings"):
        assert re.search(rf"^@pytest\.mark\.{mark}\(", marks, re.MULTILINE)
    overview = plain.llenergy("--help")
    assert overview.ret == 0
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", overview.out)
        text = plain.llenergy(command, "--help")
        assert text.ret == 0
        assert command in text.out
        assert not list(too_long(text.lines))
    version = plain.llenergy("--version")
    assert version.ret == 0
    assert re.search(r"\d+\.\d+", version.out)


def test_a_wrong_command_is_2(project: Project) -> None:
    for args in (["measure"], ["report"], ["report", "nowhere.json"], ["merge", "-o", "x.json"], ["run"]):
        ended = project.llenergy(*args)
        assert ended.ret == 2, (args, ended.text)
        assert "Traceback" not in ended.err


def test_run_has_the_exit_code_and_the_output_of_its_command(project: Project) -> None:
    meter = ["--meter=estimate"]
    for code, ret in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + 9), ("1", 0)):
        assert project.llenergy("run", *meter, "--", sys.executable, "-c", code).ret == ret
    missing = project.llenergy("run", *meter, "--", "no-such-program")
    assert missing.ret == 127
    assert "no-such-program" in missing.err
    wrong = project.llenergy("run", "--require=measured", "--meter=estimate", "--", "true")
    assert wrong.ret == 2
    done = project.llenergy("run", "--meter=estimate", "--", sys.executable, "-c", "print('hello')")
    assert done.out == "hello\n"
    assert re.search(r"estimated", done.err)
    assert re.search(r"\bm?J\b", done.err)


def test_watch_shows_watts_until_ctrl_c(project: Project) -> None:
    program = str(Path(sys.executable).with_name("llenergy"))
    meter = project.meter().replace("--energy-meter", "--meter")
    process = project.start(program, "watch", "--interval=0.2", meter)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("watch did not end") from None
    assert any(re.search(r"\bW\b", line) for line in lines), lines
    assert "J" in out + err
    assert project.survivors() == {}


def test_saved_reports_are_taken_by_name(project: Project) -> None:
    project.write("test_it.py", "import time\ndef test_it(energy): energy(time.sleep, 0.02)\n")
    project.pytest("--energy-save=main", project.meter()).check(passed=1)
    assert project.exists(".llenergy/main.json")
    assert "test_it" in project.llenergy("report", "main").out
    unknown = project.llenergy("report", "other")
    assert (unknown.ret, "saved: main" in unknown.text) == (2, True)


def test_history_finds_the_commit_of_a_change(project: Project) -> None:
    """Ten sessions at 100 J, and ten at 120 J."""
    for number in range(20):
        joules = (100 if number < 10 else 120) + 0.1 * (number % 3)
        path = write_report(project.path / f"run{number:02d}.json", {"test_a": at(joules)})
        report = json.loads(path.read_text())
        report["source"]["commit"] = f"{number:040x}"
        report["run"] |= {"id": f"r{number}", "started_at": f"2026-02-{number + 1:02d}T00:00:00Z"}
        report["run"]["finished_at"] = f"2026-02-{number + 1:02d}T00:10:00Z"
        path.write_text(json.dumps(report))
    added = project.llenergy("history", "add", *(f"run{number:02d}.json" for number in range(20)))
    assert added.ret == 0, added.text
    shown = project.llenergy("history", "show", "--format=json")
    assert shown.ret == 0
    standings = json.loads(shown.out)["standings"]
    assert {change["commit"] for each in standings for change in each["changes"]} == {f"{10:040x}"}
    assert "test_a" in project.llenergy("history", "show").out
