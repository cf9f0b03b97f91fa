# SPDX-License-Identifier: Apache-2.0
"""Sessions that do not finish stop the comparison; their measurements are kept but not taken as complete."""

from __future__ import annotations

import importlib.abc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llenergy.ab.progress import SessionWatch
from pytest_llenergy.cli import main

from .project import Project, Result

#: Two tests that measure and one between them in which something happens on the head.
BETWEEN = """
import os
import pytest
from pathlib import Path
from work import use, work

def test_a(energy):
    energy(work)

def test_between():
    HAPPENS

def test_b(energy):
    energy(use, 5.0)
"""

#: Like a full disk: the report is longer than the limit, the output of pytest is not.
FULL = """import resource
    if Path(os.environ["FULL"]).exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))"""


def compared(project: Project) -> Result:
    return project.ab("--base=main", "--pairs=4", "--rounds-per-session=2", "--", "pytest", "-q")


def on_the_head(project: Project, happens: str) -> str:
    """Commit a head on which something happens. Return the beginning of the error message."""
    project.write("test_some.py", BETWEEN.replace("HAPPENS", "pass"))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.write("test_some.py", BETWEEN.replace("HAPPENS", happens))
    return f"llenergy ab: session 2 (head {project.commit()[:7]})"


def test_usage_error_of_pytest_stops_the_comparison(project: Project) -> None:
    message = project.error("--base=HEAD", "--head=HEAD", "--", "pytest", "--no-such-option")
    (log,) = (project.path / ".llenergy").rglob("001-base.1.log")
    commit = project.git("rev-parse", "HEAD")[:7]
    assert message.startswith(f"session 1 (base {commit}) ended with exit code 4: '")
    assert message.endswith(f"; the whole log: {log}")


def test_killed_session_stops_the_comparison(project: Project) -> None:
    project.write("test_some.py", "import os\ndef test_a(): os.kill(os.getpid(), 9)")
    project.commit()
    message = project.error("--base=HEAD", "--head=HEAD", "--", "pytest")
    assert "was killed by signal 9: " in message


def test_collection_error_stops_the_comparison(project: Project) -> None:
    project.write("test_some.py", "import no_such_module")
    project.commit()
    result = project.ab("--base=HEAD", "--head=HEAD", "--", "pytest", "-q")
    assert "ended with exit code 2: " in result.lines[-1]
    assert "  | ERROR test_some.py" in result.err


@pytest.mark.slow
def test_session_without_measurements_stops_the_comparison(project: Project) -> None:
    project.write("test_some.py", "def test_a(): pass")
    project.commit()
    for _ in range(2):
        message = project.error("--base=HEAD", "--head=HEAD", "--", "pytest")
        assert "measured no test; the whole log: " in message


@pytest.mark.parametrize(
    ("option", "message"),
    [("-qx", "--maxfail (-x) is set, "), pytest.param("--sw", "--stepwise is set, ", marks=pytest.mark.slow)],
)
def test_project_settings_that_stop_sessions_are_refused(project: Project, option: str, message: str) -> None:
    project.environment["PYTEST_ADDOPTS"] = "-p pytest_llenergy.plugin"
    project.write("pytest.ini", f"[pytest]\naddopts = {option}\n")
    project.commit()
    found = project.error("--base=HEAD", "--head=HEAD", "--", "pytest")
    assert f"ended with exit code 4: 'ERROR: {message}" in found.replace('"', "'")


@pytest.mark.parametrize(
    ("happens", "how"),
    [
        ("os._exit(0)", "ended with exit code 0 before pytest had finished: "),
        pytest.param(
            "pytest.exit('enough', returncode=0)",
            "ended with exit code 0 and was stopped before all tests had run: ",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_session_that_exits_early_stops_the_comparison(project: Project, happens: str, how: str) -> None:
    message = on_the_head(project, happens)
    for _ in range(2):
        result = compared(project)
        assert (result.status, result.out) == (2, "")
        assert result.lines[-1].startswith(f"{message} {how}")
    assert "resuming a stopped comparison: 1 sessions are finished" in result.lines


@pytest.mark.slow
def test_session_that_could_not_write_its_report_is_repeated(project: Project, tmp_path: Path) -> None:
    full = tmp_path / "full"
    project.environment["FULL"] = str(full)
    message = on_the_head(project, FULL)
    full.touch()
    result = compared(project)
    assert result.status == 2
    assert result.lines[-1].startswith(f"{message} ended with exit code 1 before pytest had finished: ")
    full.unlink()
    assert compared(project).status == 0
    paired = project.paired()
    assert [each.verdict for each in paired.compared.comparisons] == ["unchanged", "unchanged"]
    assert [len(each.rounds) for each in paired.head.records] == [4, 4]
    assert (paired.complete, paired.compared.notes) == (True, [])


def test_removed_checkout_stops_the_comparison_which_can_continue(project: Project) -> None:
    on_the_head(project, 'import shutil; shutil.rmtree(Path(os.environ["LLENERGY_AB_ROOT"]).parent / "base")')
    result = compared(project)
    assert result.status == 2
    assert result.lines[-1].startswith("llenergy ab: ")
    assert "/base: No such file or directory, so no session can start there; " in result.lines[-1]
    assert compared(project).status == 0
    assert [len(each.rounds) for each in project.paired().head.records] == [4, 4]


@pytest.mark.slow
def test_truncated_report_of_a_session_names_the_remedy(project: Project) -> None:
    message = on_the_head(project, 'assert "FAIL" not in os.environ or os._exit(3)')
    project.environment["FAIL"] = "1"
    assert compared(project).lines[-1].startswith(f"{message} ended with exit code 3")
    (report,) = (project.path / ".llenergy").rglob("001-base.1.json")
    report.write_bytes(report.read_bytes()[:100])
    del project.environment["FAIL"]
    result = compared(project)
    assert result.status == 2
    assert str(report) in result.lines[-1]
    assert "; llenergy ab --fresh discards " in result.lines[-1]
    assert (
        project.ab(
            "--fresh", "--base=main", "--pairs=4", "--rounds-per-session=2", "--", "pytest", "-q"
        ).status
        == 0
    )


def test_import_error_stops_the_comparison_despite_continue_option(project: Project) -> None:
    message = on_the_head(project, "pass")
    project.write("test_other.py", "import nothing\n")
    project.commit()
    result = project.ab("--base=main", "--pairs=4", "--", "pytest", "-q", "--continue-on-collection-errors")
    assert result.status == 2
    assert "was stopped before all tests had run" in result.lines[-1]
    assert message.partition("(")[0] in result.lines[-1]


class Interrupting(importlib.abc.MetaPathFinder):
    """Raise KeyboardInterrupt during an import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pytest_llenergy.ab.campaign":
            raise KeyboardInterrupt


def test_interrupt_during_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pytest_llenergy.ab.campaign", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main(["ab", "--", "pytest"]) == 130
    assert capsys.readouterr().err.startswith("llenergy ab: interrupted; ")


HOLDER = """
import subprocess
import sys
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire

acquire(LockRequest((DeviceLock("cpu"),)), 0.0, "tests/other.py::test_long")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_wait_for_a_lease_is_shown_with_its_holder(project: Project) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=project.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        running = project.start("--base=HEAD", "--head=HEAD", "--pairs=4", "--", "pytest", "-q")
        try:
            assert running.stderr is not None
            lines = iter(running.stderr.readline, "")
            next(line for line in lines if line.startswith("session 1 "))
            waiting = next(line for line in lines if line.startswith("  waiting: "))
        finally:
            running.terminate()
            running.communicate(timeout=60)
    finally:
        holder.communicate(timeout=60)
    # Long before the other lines of a session; pytest itself may take long to start.
    waited = re.search(r"\((\d+) s so far\)$", waiting)
    assert waited is not None, waiting
    assert int(waited[1]) < 15
    assert waiting.startswith("  waiting: test_some.py::test_a: ")
    assert str(holder.pid) in waiting
    assert "tests/other.py::test_long" in waiting


def test_repeated_waits_are_said_ever_more_rarely(tmp_path: Path) -> None:
    log, said = tmp_path / "log", list[str]()
    log.touch()
    with log.open() as printed, log.open("a") as written:
        watch = SessionWatch(printed, said.append, "session 3", 60.0)
        for line in (
            "cpu is held by A (1 s so far)",
            "cpu is held by A (31 s so far)",
            "cpu is held by B (2 s so far)",
        ):
            written.write(f"energy: test_a: {line}\n")
            written.flush()
            watch.poll()
    assert [line.partition("held by ")[2] for line in said] == ["A (1 s so far)", "B (2 s so far)"]


def test_session_without_output_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("collecting\rcollecting 5 items")
    now_s, said = 100.0, list[tuple[float, str]]()
    monkeypatch.setattr("pytest_llenergy.ab.progress.time.monotonic", lambda: now_s)
    with log.open() as printed:
        watch = SessionWatch(
            printed, lambda line: said.append((now_s, line)), "session 1 (base abc)", first_s=20.0
        )
        # Polls more often than any line is due.
        for elapsed_s in range(150):
            now_s = 100.0 + elapsed_s
            watch.poll()
    assert said[0] == (120.0, "  session 1 (base abc) runs, 0:20 so far: collecting 5 items")
    assert [each for each, _ in said] == [120, 140, 180]


#: A benchmark in a directory that the baseline lacks.
ADDED = "from work import work\ndef test_new(energy): energy(work)"


@pytest.mark.parametrize("args", [["pytest", "benchmarks"], ["pytest", "-q", "-k", "new"]])
@pytest.mark.slow
def test_baseline_without_energy_tests_passes_and_says_so(project: Project, args: list[str]) -> None:
    project.git("checkout", "-q", "-b", "feature")
    project.write("benchmarks/test_new.py", ADDED)
    project.commit()
    result = project.ab("--base=main", "--pairs=4", "--", *args)
    assert result.status == 0
    assert result.lines[-1] == "llenergy ab: no baseline: 1 new test"
    paired = project.paired()
    assert [each.verdict for each in paired.compared.comparisons] == ["new"]
    commits = [project.git("rev-parse", name) for name in ("main", "feature")]
    assert [paired.base.source.commit, paired.head.source.commit] == commits
    assert (paired.base.records, len(paired.head.records[0].rounds)) == ([], 1)
    assert main(["compare", str(project.path / ".llenergy" / "ab.json")]) == 0


def test_a_module_that_only_the_base_skips_is_named(project: Project) -> None:
    project.write("test_some.py", "import pytest\npytest.skip('no GPU', allow_module_level=True)")
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.write("test_some.py", ADDED)
    project.commit()
    assert project.ab("--base=main", "--pairs=4", "--", "pytest").status == 0
    line = "base: only there test_some.py is skipped, so its tests are not compared"
    assert project.paired().compared.notes == [line]


@pytest.mark.parametrize(
    ("fails", "verdict", "reason"),
    [
        ('"004-" in os.environ["LLENERGY_AB_DONE"]', "invalid", "the baseline test is invalid (session 4: "),
        ('"001-" in os.environ["LLENERGY_AB_DONE"]', "new", "the baseline test failed (session 1: "),
    ],
    ids=["once", "always"],
)
@pytest.mark.parametrize("how", ["assert 0", "pytest.skip('busy')"])
@pytest.mark.slow
def test_a_base_that_does_not_work_is_no_pass(
    project: Project, fails: str, verdict: str, reason: str, how: str
) -> None:
    code = f"import os, pytest\nfrom work import work\ndef test_a(energy):\n    if {fails}:\n        {how}\n"
    project.write("test_some.py", f"{code}    energy(work)\n")
    project.commit()
    result = project.ab("--base=HEAD", "--head=HEAD", "--pairs=4", "--", "pytest")
    (found,) = project.paired().compared.comparisons
    if "skip" in how:
        reason = reason.replace("failed", "was skipped")
    assert (found.verdict, found.reason[: len(reason)]) == (verdict, reason)
    assert result.status == 5
    warning = "llenergy ab: warning: 1 test failed or skipped in the baseline and cannot be gated"
    assert (warning in result.lines) == (verdict == "new")


def test_directory_that_the_baseline_lacks_is_no_baseline(project: Project) -> None:
    project.git("checkout", "-q", "-b", "feature")
    project.write("benchmarks/test_new.py", ADDED)
    project.commit()
    top, project.path = project.path, project.path / "benchmarks"
    result = project.ab("--base=main", "--pairs=4", "--", "pytest")
    project.path = top
    assert (result.status, result.lines[-1]) == (0, "llenergy ab: no baseline: 1 new test")


@pytest.mark.parametrize(
    ("base", "args", "how"),
    [
        # One of two paths exists on the base, and its tests must not count as new.
        ({}, ["test_some.py", "benchmarks"], "ended with exit code 4: 'ERROR: file or directory not found: "),
        ({"test_some.py": "import no_such_module"}, ["-q"], "ended with exit code 2: "),
        ({"test_some.py": "def test_a(): assert 0"}, ["-q"], "measured no test; "),
        ({"conftest.py": "raise SystemExit(5)"}, ["-q"], "ended with exit code 5"),
    ],
)
@pytest.mark.slow
def test_baseline_that_fails_is_an_error(
    project: Project, base: dict[str, str], args: list[str], how: str
) -> None:
    project.git("checkout", "-q", "-b", "feature")
    project.write("benchmarks/test_new.py", ADDED)
    project.commit()
    project.git("checkout", "-q", "main")
    for name, text in base.items():
        project.write(name, text)
    project.commit()
    project.git("checkout", "-q", "feature")
    message = project.error("--base=main", "--head=feature", "--pairs=4", "--", "pytest", *args)
    assert message.startswith(f"session 1 (base {project.git('rev-parse', 'main')[:7]}) {how}")


def test_sessions_know_the_devices_of_earlier_ones(project: Project, tmp_path: Path) -> None:
    """Under pytest-xdist a test would run on any board that is free, and its rounds would not count."""
    log = tmp_path / "devices.jsonl"
    project.write(
        "test_some.py",
        f"import os\nfrom pathlib import Path\nfrom work import work\ndef test_a(energy):\n    energy(work)\n"
        f"    known = Path(os.environ['LLENERGY_AB_DEVICES']).read_text()\n"
        f"    with open({str(log)!r}, 'a') as file:\n        print(known, file=file)\n",
    )
    project.commit()
    result = project.ab(
        "--base=HEAD", "--head=HEAD", "--pairs=4", "--rounds-per-session=2", "--", "pytest", "-q"
    )
    assert result.status == 0, result.err
    first, *others = map(json.loads, log.read_text().splitlines())
    assert first == {}
    assert others == [{"test_some.py::test_a": ["cpu"]}] * len(others)
    assert others
