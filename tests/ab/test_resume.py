# SPDX-License-Identifier: Apache-2.0
"""A stopped comparison can be resumed: no measurement is lost and no process is left behind."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.report.store import read_report

from .project import Project

QUICK = ["--base=HEAD", "--head=HEAD", "--pairs=4", "--rounds-per-session=2"]

#: In the third session, the second test writes its process id and waits to be stopped.
WAITING = """
import os, time
from pathlib import Path
from work import use, work

def test_a(energy):
    energy(work)

def test_b(energy):
    if "003-" in os.environ["LLENERGY_AB_DONE"] and not Path(os.environ["GO_ON"]).exists():
        Path(os.environ["GO_ON"]).write_text(str(os.getpid()))
        time.sleep(300)  # until it is killed
    energy(use, 5.0)
"""


@pytest.fixture
def waiting(project: Project, tmp_path: Path) -> Project:
    project.environment["GO_ON"] = str(tmp_path / "pid")
    project.write("test_some.py", WAITING)
    project.commit()
    return project


def until(met: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


def stop(waiting: Project, number: signal.Signals) -> tuple[int, str]:
    """Send a signal while the second test of the third session runs."""
    process = waiting.start(*QUICK, "--", "pytest")
    pid = Path(waiting.environment["GO_ON"])
    until(lambda: pid.exists() and pid.read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    # The session must end with its parent, however that was stopped.
    until(lambda: not alive(int(pid.read_text())))
    return process.returncode, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # Never there, or gone since the file was opened.
        return False


def check_resumes(waiting: Project) -> None:
    result = waiting.ab(*QUICK, "--", "pytest")
    assert result.status == 0
    assert "resuming a stopped comparison: 2 sessions are finished" in result.lines
    paired = waiting.paired()
    # The third session ran twice: the first time it measured one of two tests.
    assert [each.side for each in paired.sessions] == ["base", "head", "head", "head", "base"]
    for side in (paired.base, paired.head):
        assert [len(each.rounds) for each in side.records] == [4, 4]
    assert paired.complete


def test_killed_comparison_resumes(waiting: Project) -> None:
    stop(waiting, signal.SIGKILL)
    (journal,) = (waiting.path / ".llenergy").rglob("003-*.journal.jsonl")
    assert len(read_report(journal).records) == 1
    # As if the machine had rebooted since.
    (end,) = (waiting.path / ".llenergy").rglob("001-*.end")
    end.write_text(end.read_text().replace('"boot":"', '"boot":"another-'))
    check_resumes(waiting)
    notes = waiting.paired().compared.notes
    assert "rounds of 2 boots: the machine was restarted in between" in notes
    assert len(waiting.paired().sessions) == len({each.run_id for each in waiting.paired().sessions})


@pytest.mark.slow
def test_interrupted_comparison_resumes(waiting: Project) -> None:
    status, err = stop(waiting, signal.SIGINT)
    assert status == 130
    assert err.splitlines()[-1] == "llenergy ab: interrupted; run the same command again to continue"
    (log,) = (waiting.path / ".llenergy").rglob("003-*.log")
    # A second interrupt would have hit pytest while it shuts down.
    assert len(re.findall("!! KeyboardInterrupt !!", log.read_text())) == 1
    assert re.search(r"1 passed in [\d.]+s", log.read_text().splitlines()[-1])
    check_resumes(waiting)


@pytest.mark.slow
def test_second_process_is_refused_and_fresh_discards(waiting: Project) -> None:
    first = waiting.start(*QUICK, "--", "pytest")
    until(lambda: Path(waiting.environment["GO_ON"]).exists())
    second = waiting.ab(*QUICK, "--", "pytest")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 143
    assert second.status == 2
    message = f"llenergy ab: process {first.pid} is running this comparison; wait for it or stop it, "
    assert second.lines[-1] == f"{message}its measurements are kept"
    # Comparisons that measured nothing are not kept.
    waiting.ab("--base=HEAD", "--head=HEAD", "--pairs=6", "--", "pytest", "--no-such-option")
    other = waiting.ab("--base=HEAD", "--head=HEAD", "--pairs=5", "--", "pytest", "--no-such-option")
    (line,) = [line for line in other.lines if "unfinished" in line]
    assert (
        line == f"1 other unfinished comparison in {waiting.path / '.llenergy' / 'ab'} (--fresh discards it)"
    )
    fresh = waiting.ab(*QUICK, "--fresh", "--", "pytest", "-k", "test_a")
    assert (fresh.status, "unfinished" in fresh.err, "stopped" in fresh.err) == (0, False, False)
    assert len(waiting.paired().sessions) == 4
    assert waiting.git("worktree", "list").count("\n") == 0
