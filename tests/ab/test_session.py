# SPDX-License-Identifier: Apache-2.0
"""Real sessions: pytest and other processes, how they end, and what they tell while they run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.ab.sides import SAME_CODE

from ..conftest import TEN_WATTS
from .project import Project

QUICK = ["--base=HEAD", "--head=HEAD", "--pairs=4", "--rounds-per-session=2", "--", "pytest"]

#: In the third session, the second test writes its process id and waits to be stopped.
WAITING = """
import os, time
from pathlib import Path
from work import use, work

def test_a(energy):
    energy(work)

def test_b(energy):
    if "003-" in os.environ["LLENERGY_AB_SESSION"] and not Path(os.environ["GO_ON"]).exists():
        Path(os.environ["GO_ON"]).write_text(str(os.getpid()))
        time.sleep(300)  # until it is killed
    energy(use, 5.0)
"""


def until(met: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # Never there, or gone since the file was opened.
        return False


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_stopped_comparison_leaves_no_process_and_resumes(
    project: Project, tmp_path: Path, number: signal.Signals
) -> None:
    project.environment["GO_ON"] = str(tmp_path / "pid")
    project.write("test_some.py", WAITING)
    project.commit()
    process = project.start(*QUICK)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text())
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
    # The session must end with its parent, however that was stopped.
    until(lambda: not alive(int(pid.read_text())))
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == "llenergy ab: interrupted; run the same command again to continue"
        (log,) = (project.path / ".llenergy").rglob("003-*/session.log")
        # A second interrupt would have hit pytest while it shuts down.
        assert len(re.findall("!! KeyboardInterrupt !!", log.read_text())) == 1
    result = project.ab(*QUICK)
    assert result.status == 0
    assert "resuming a stopped comparison: 2 sessions are finished" in result.lines
    paired = project.paired()
    # The third session ran twice.
    assert [each.side for each in paired.sessions] == ["base", "head", "head", "base"]
    assert len({each.run_id for each in paired.sessions}) == 4
    for side in (paired.base, paired.head):
        assert [len(each.rounds) for each in side.records] == [4, 4]


@pytest.mark.clock
@pytest.mark.slow
def test_higher_power_of_a_commit_is_found(project: Project) -> None:
    meter = TEN_WATTS.replace("10 * time", "work.WATTS * time").replace("import time", "import time, work")
    project.write("conftest.py", meter)
    project.write("work.py", "WATTS = 10\n")
    project.write("test_some.py", "import time\ndef test_a(energy):\n    energy(time.sleep, 0.2)\n")
    # Settings that compare are for other runs.
    project.write("pytest.ini", "[pytest]\nenergy_compare = nothing\nenergy_fail_on = energy_j:3%\n")
    project.commit()
    project.edit("work.py", "10", "13")
    project.commit()
    done = project.ab(
        *("--base=HEAD~1", "--pairs=4", "--rounds-per-session=2", "--metric=mean_power_w", "--", "pytest"),
        *("-p", "no:cacheprovider", "--energy-meter=ten-watts", "--energy-warmup=0"),
    )
    assert done.status == 1, done.err
    (found,) = project.paired().compared.comparisons
    assert (found.verdict, found.kind) == ("regressed", "measured")
    # Power, because a busy machine stretches the rounds; and it may take more of them than were asked for.
    assert min(found.n_base, found.n_head) >= 4
    assert found.ratio == pytest.approx(1.3, rel=0.02)


@pytest.mark.slow
def test_workers_of_xdist_skip_finished_tests(project: Project) -> None:
    project.write(
        "test_some.py",
        "from work import use, work\n"
        "def test_a(energy): energy(work)\n"
        "def test_b(energy): energy(use, 5.0)\n",
    )
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.commit()
    words = ["--pairs=4+4", "--rounds-per-session=4", "--", "pytest", "-p", "xdist", "-n", "1"]
    assert project.ab(*words).status == 1
    rounds = {each.id.partition("::")[2]: len(each.rounds) for each in project.paired().head.records}
    assert rounds == {"test_a": 8, "test_b": 4}


@pytest.mark.parametrize(
    ("test", "ini", "how"),
    [
        ("import no_such_module", "", "ended with exit code 2: "),
        (
            "def test_a(energy): assert 0",
            "addopts = -qx",
            "ended with exit code 1 before all tests had run: ",
        ),
        ("import os\ndef test_a(): os._exit(0)", "", "ended with exit code 0 before all tests had run: "),
    ],
)
def test_a_session_that_does_not_finish_is_named(project: Project, test: str, ini: str, how: str) -> None:
    # Settings of the project are read from addopts, which this variable would replace.
    project.environment["PYTEST_ADDOPTS"] = "-p pytest_llenergy.plugin"
    project.write("test_some.py", test)
    project.write("pytest.ini", f"[pytest]\n{ini}\n")
    project.commit()
    assert f" {how}" in project.error(*QUICK).replace('"', "'")


def test_a_session_that_imported_foreign_code_is_refused_and_discarded(
    project: Project, tmp_path: Path
) -> None:
    """It is also installed."""
    project.write("src/thing/__init__.py", "")
    project.edit("test_some.py", "from work", "import thing\nfrom work")
    project.commit()
    module = tmp_path / "site-packages" / "thing" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.touch()
    project.extend_path(module.parents[1])
    message = f"base imported thing from {module} instead of its own src/thing, {SAME_CODE}"
    assert project.error(*QUICK) == message
    assert project.session_logs() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_measured_command_ends_with_the_comparison(
    project: Project, tmp_path: Path, number: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    process = project.start("--meter=estimate", f"--a=echo $$ > {pid}; exec sleep 300", "--b=true")
    until(lambda: pid.exists() and pid.read_text())
    process.send_signal(number)
    process.communicate(timeout=60)
    until(lambda: not alive(int(pid.read_text())))


HOLDER = """
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
        running = project.start(*QUICK)
        try:
            assert running.stderr is not None
            lines = iter(running.stderr.readline, "")
            waiting = next(line for line in lines if line.startswith("  waiting: "))
        finally:
            running.terminate()
            running.communicate(timeout=60)
    finally:
        holder.communicate(timeout=60)
    assert waiting.startswith("  waiting: test_some.py::test_a: ")
    assert str(holder.pid) in waiting
    assert "tests/other.py::test_long" in waiting
