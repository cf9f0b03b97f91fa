# SPDX-License-Identifier: Apache-2.0
"""The supervisor between pytest and its ranks: no process of a run outlives it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.local import LocalHost

from .groups import (
    leave_daemon,
    run,
    start,
)
from .survivors import await_none, survivors


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine processes may end late, and write their stacks late."""
    for name in ("EXIT_CODE_TIMEOUT_S", "STACKS_TIMEOUT_S"):
        monkeypatch.setattr(timeouts, name, 60.0)


def test_processes_left_by_ranks_end_with_their_group(host: LocalHost, mark: str) -> None:
    ranks = start(host)
    daemons = run(ranks, leave_daemon)
    assert set(daemons) <= set(survivors(mark))
    ranks.close()
    # Only the supervisor waits for the next group, and its guard.
    assert len(survivors(mark)) == 2
    host.close()
    assert await_none(mark) == {}


def test_orphans_of_a_living_rank_are_left_alone(host: LocalHost, mark: str) -> None:
    ranks = start(host, 1)
    (daemon,) = run(ranks, leave_daemon)
    run(ranks, sum, ())
    assert daemon in survivors(mark)
    assert isinstance(daemon, int)
    assert psutil.Process(daemon).ppid() == ranks.ranks[0].pid
    ranks.close()


def leave_stranger() -> int:
    """Leave a grandchild with an empty environment."""

    code = "import os, time; print(os.getpid(), flush=True); os.close(1); time.sleep(300)"
    with subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" &', sys.executable, code],
        stdout=subprocess.PIPE,
        env={},
        start_new_session=True,
        close_fds=True,
    ) as shell:
        assert shell.stdout is not None
        return int(shell.stdout.readline())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("which", "number"),
    [("supervisor", signal.SIGKILL), ("guard", signal.SIGKILL), ("guard", signal.SIGTERM)],
)
def test_supervisor_and_guard_clean_up_after_each_other(
    host: LocalHost, mark: str, which: str, number: signal.Signals
) -> None:
    ranks = start(host, 1)
    (stranger,) = run(ranks, leave_stranger)
    assert isinstance(stranger, int)
    supervisor = psutil.Process(ranks.ranks[0].pid).ppid()
    guard = psutil.Process(supervisor).ppid()
    assert guard not in (1, os.getpid())
    os.kill(supervisor if which == "supervisor" else guard, number)
    try:
        # Without any request.
        assert is_gone(stranger)
        assert is_gone(ranks.ranks[0].pid)
        assert is_gone(supervisor)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stranger, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"supervisor of the ranks \(pid {supervisor}\) .*its ranks ended"):
        run(ranks, sum, ())
    again = start(host, 1)
    assert run(again, max, 1, 2) == [2]
    again.close()


def test_a_supervisor_that_does_not_answer_is_replaced(
    host: LocalHost, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(host, 1)
    (supervisor,) = run(ranks, os.getppid)
    assert isinstance(supervisor, int)
    os.kill(supervisor, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(timeouts, "SUPERVISOR_ANSWER_TIMEOUT_S", 0.5)
        patch.setattr(timeouts, "SUPERVISOR_STOP_TIMEOUT_S", 0.5)
        ranks.close()
    assert await_none(mark) == {}
    again = start(host, 1)
    assert run(again, max, 1, 2) == [2]
    again.close()
