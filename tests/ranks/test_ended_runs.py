# SPDX-License-Identifier: Apache-2.0
"""However a run of pytest ends, no process of it is left.

Each run is a real pytest with real ranks. Processes that are left are found by a marker in the environment,
not by parentage.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.ranks.start_method import StartMethod

from .no_torch import without_torch
from .run_matrix import FORKED, SPAWNED, Where, everywhere
from .survivors import check_nothing_is_left, marked, survivors

HANGS = """
import os, time, pytest

@pytest.mark.gpus({n}, fallback="cpu")
def test_hangs(workers):
    workers.run(lambda: (open("running-" + os.environ["RANK"], "w").close(), time.sleep(300)))

def test_after():
    pass
"""


@everywhere(SPAWNED, FORKED, name="ended_by", values=["signal", "thread"])
@pytest.mark.slow
def test_a_timeout_of_pytest_timeout_leaves_no_process(
    pytester: pytest.Pytester, mark: str, ended_by: str, where: Where
) -> None:
    pytester.makepyfile(HANGS.format(n=where.n))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments(), "--timeout=4", f"--timeout-method={ended_by}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    # The thread method ends the process at once, without teardown; a worker of pytest-xdist just vanishes.
    message = "crashed while running" if ended_by == "thread" and where.xdist else "Timeout"
    assert message in result.stdout.str() + result.stderr.str()
    if ended_by == "signal" or where.xdist:
        result.assert_outcomes(failed=1, passed=1)
    check_nothing_is_left(mark)


ENDS = """
import os, pytest

N = {n}
pytestmark = pytest.mark.gpus(N, fallback="cpu")

@pytest.mark.parametrize("i", range(3))
def test_it(workers, i):
    def work():
        if os.environ["RANK"] == str(N - 1):
            {work}
    workers.run(work)
"""

#: What a rank does, by its name, and what pytest then prints.
ENDINGS = {
    "ctrl-c": ("raise KeyboardInterrupt", "!! KeyboardInterrupt !!"),
    "exit": ("pytest.exit('enough of it', 7)", "Exit: enough of it"),
}


@everywhere(SPAWNED, FORKED, name="ending", values=list(ENDINGS))
def test_ctrl_c_and_pytest_exit_in_a_rank_end_the_run(
    pytester: pytest.Pytester, mark: str, ending: str, where: Where
) -> None:
    work, message = ENDINGS[ending]
    if where.xdist:
        # Which fails by itself on a worker that ends with another status.
        work = work.replace(", 7", "")
    pytester.makepyfile(ENDS.format(n=where.n, work=work))
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*where.arguments())
    # pytest-xdist does not distinguish the two.
    assert ("received keyboard-interrupt" if where.xdist else message) in result.stdout.str()
    assert result.ret == (7 if ending == "exit" and not where.xdist else pytest.ExitCode.INTERRUPTED)
    assert "passed" not in result.parseoutcomes()
    check_nothing_is_left(mark)


@pytest.mark.parametrize(
    ("n", "method"),
    [
        (1, "spawn"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "forkserver"), (4, "spawn"), (4, "forkserver"))
        ),
    ],
)
@pytest.mark.slow
def test_an_xdist_worker_that_dies_leaves_no_process(
    pytester: pytest.Pytester, mark: str, n: int, method: StartMethod
) -> None:
    pytester.makepyfile(
        f"""
        import os, signal, pytest
        pytestmark = pytest.mark.gpus({n}, fallback="cpu")
        def test_dies(workers):
            workers.run(max, 1, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        def test_after(workers):
            assert workers.run(max, 1, 2) == [2] * {n}
        """,
    )
    without_torch(pytester.path)
    result = pytester.runpytest_subprocess(*Where(n, method, xdist=True).arguments())
    result.assert_outcomes(passed=1, failed=1)
    assert "crashed while running" in result.stdout.str()
    check_nothing_is_left(mark)


@pytest.mark.parametrize(
    ("n", "method"),
    [
        (2, "spawn"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "spawn"), (1, "forkserver"), (4, "spawn"), (4, "forkserver"))
        ),
    ],
)
@pytest.mark.slow
def test_a_killed_xdist_controller_leaves_no_process(
    pytester: pytest.Pytester, mark: str, n: int, method: StartMethod
) -> None:
    pytester.makepyfile(HANGS.format(n=n))
    without_torch(pytester.path)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *Where(n, method, xdist=True).arguments()],
        cwd=pytester.path,
        stdout=subprocess.DEVNULL,
    ) as controller:
        while len(list(pytester.path.glob("running-*"))) < n:
            assert controller.poll() is None
            time.sleep(0.01)
        workers = {pid for pid, line in survivors(mark).items() if "exec(eval(" in line}
        assert len(workers) == 2
        controller.kill()
        # execnet ends a worker five seconds after its controller. What it has started may take longer.
        deadline = time.monotonic() + 4.5
        while workers & set(survivors(mark)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    check_nothing_is_left(mark)


KILLED = """
import os, subprocess, time, pytest
def work():
    # As some libraries leave: in a session of its own, without inherited descriptors.
    subprocess.Popen(["sleep", "300"], start_new_session=True, close_fds=True)
    time.sleep(0.05)
@pytest.mark.parametrize("i", range(1000))
def test_it(workers, monkeypatch, i):
    if i % 3 == 0:
        # Other ranks.
        monkeypatch.setenv("FRESH", str(i))
    workers.run(work)
"""

#: How many runs are started and killed at a time. Each batch takes some seconds.
AT_A_TIME = 2

#: A run is killed between its start and this many times the time until the first run had ranks.
LATEST = 1.5


@dataclass(frozen=True)
class Killable:
    """A run of pytest, the marker of its processes, and the directory of its leases."""

    mark: str
    locks: Path
    pytest_: subprocess.Popen[bytes]

    def has_ranks(self) -> bool:
        # Beside pytest itself, the supervisor and its guard.
        return len(survivors(self.mark)) > 3


@pytest.mark.parametrize(
    ("method", "kills"),
    [
        pytest.param("spawn", 16, marks=pytest.mark.slow),
        pytest.param("forkserver", 16, marks=pytest.mark.slow),
    ],
)
def test_a_pytest_that_is_killed_at_any_moment_leaves_no_process_and_no_lease(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kills: int
) -> None:
    pytester.makepyfile(KILLED)
    without_torch(pytester.path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--energy-start-method={method}"]

    def start(end: ExitStack) -> Killable:
        mark = end.enter_context(marked())
        locks = tmp_path / mark
        locks.mkdir(mode=0o700)
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(locks))
        return Killable(mark, locks, subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL))

    def kill(run: Killable) -> None:
        run.pytest_.kill()
        run.pytest_.wait()
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(run.locks))
        check_nothing_is_left(run.mark)

    with ExitStack() as end:
        began_s = time.monotonic()
        running = [start(end) for _ in range(AT_A_TIME)]
        while not all(run.has_ranks() for run in running):
            time.sleep(0.05)
        latest_s = LATEST * (time.monotonic() - began_s)
        for run in running:
            kill(run)
    had_ranks = 0
    for first in range(0, kills, AT_A_TIME):
        with ExitStack() as end:
            began_s = time.monotonic()
            running = [start(end) for _ in range(AT_A_TIME)]
            for place, run in enumerate(running):
                # Spread over the whole time, in every batch.
                moment_s = latest_s * (place + (first + 0.5) / kills) / AT_A_TIME
                time.sleep(max(0.0, began_s + moment_s - time.monotonic()))
                had_ranks += run.has_ranks()
                kill(run)
    # Otherwise they were killed too early to prove anything.
    assert had_ranks >= kills // 8
