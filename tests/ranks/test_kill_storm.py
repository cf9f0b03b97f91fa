# SPDX-License-Identifier: Apache-2.0
"""Kill pytest, the guard, the supervisor or a rank at random moments: no process and no lease is left.

Each run is a real pytest with real ranks. Processes that are left are found by a marker in the environment,
not by parentage. Run it alone with ``pytest tests/ranks/test_kill_storm.py -m slow``: 108 kills.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.ranks.host import StartMethod

from .groups import METHODS
from .no_torch import without_torch
from .survivors import check_nothing_is_left, marked, survivors

#: Of each victim, half of them with each start method.
KILLS = 27

#: The victim is killed within this time (s) after all processes were seen.
LATEST_S = 0.5

TESTS = """
import subprocess, time, pytest
def work():
    # As some libraries leave: in a session of its own, without inherited descriptors.
    subprocess.Popen(["sleep", "300"], start_new_session=True, close_fds=True)
    time.sleep(0.05)
@pytest.mark.gpus(2, fallback="cpu")
@pytest.mark.parametrize("i", range(400))
def test_it(workers, monkeypatch, i):
    if i % 3 == 0:
        # Other ranks.
        monkeypatch.setenv("FRESH", str(i))
    workers.run(work)
"""


def find_victims(pid: int) -> dict[str, psutil.Process] | None:
    """Return pytest, the guard, the supervisor and a rank; None while there are not all."""
    # With forkserver idle supervisors of other environments stay.
    with suppress(psutil.Error):
        for guard in (pytest_ := psutil.Process(pid)).children():
            for supervisor in guard.children():
                for rank in supervisor.children():
                    return {"pytest": pytest_, "guard": guard, "supervisor": supervisor, "rank": rank}
    return None


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("victim", ["pytest", "guard", "supervisor", "rank"])
def test_nothing_is_left_whatever_is_killed_when(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    victim: str,
    method: StartMethod,
) -> None:
    pytester.makepyfile(TESTS)
    without_torch(pytester.path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--energy-start-method={method}"]
    left = KILLS // 2 + (KILLS % 2 if method == "spawn" else 0)
    moments = random.Random(f"{victim} {method}")
    while left:
        with marked() as mark:
            locks = tmp_path / mark
            locks.mkdir(mode=0o700)
            monkeypatch.setenv("LLENERGY_LOCK_DIR", str(locks))
            run = subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL)
            try:
                while left and run.poll() is None:
                    if (victims := find_victims(run.pid)) is None:
                        time.sleep(0.01)
                        continue
                    time.sleep(moments.uniform(0, LATEST_S))
                    with_guard = {victims["guard"].pid, *descendants(victims["guard"])}
                    try:
                        victims[victim].kill()
                    except psutil.NoSuchProcess:
                        continue
                    left -= 1
                    if victim != "rank":
                        await_end(with_guard, mark)
            finally:
                run.kill()
                run.wait()
            check_nothing_is_left(mark)


def descendants(process: psutil.Process) -> set[int]:
    """Return the pids below a process; none if it has ended."""
    try:
        return {each.pid for each in process.children(recursive=True)}
    except psutil.Error:
        return set()


def await_end(pids: set[int], mark: str) -> None:
    """Wait for the end of processes, also while pytest goes on."""
    deadline = time.monotonic() + 60
    while pids & set(survivors(mark)):
        assert time.monotonic() < deadline, survivors(mark)
        time.sleep(0.01)
