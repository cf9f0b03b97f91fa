# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of whoever takes part, at any point: devices are free after the last user, and not before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.devices.lockdir import LockDirectory
from pytest_llenergy.devices.tickets import list_entries

from .lockers import Locker, MakeLocker, tickets, until

#: Dies at a given line of the code that takes and frees leases, counted from the first; the next one must
#: then have the device at once. Prints the last line at which one has died.
LINES = """
import os, random, signal, sys, time
from pathlib import Path
from pytest_llenergy.devices import locks
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.errors import DeviceError
ROOM = str(Path(locks.__file__).parent)
request = LockRequest((DeviceLock("a"), DeviceLock("b", True)))

def doomed(line, wait_s):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        seen += event == "line"
        if seen == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    try:
        locks.acquire(request, wait_s).release()
    except DeviceError:
        pass
    os._exit(0)

def check():
    locks.acquire(request, 0.0).release()

taken = sys.argv[1] == "taken"
line = reached = 0
while True:
    line += random.randint(1, 16)
    held = locks.acquire(request, 0.0) if taken else None
    child = os.fork() or doomed(line, 0.03)
    status = os.waitpid(child, 0)[1]
    if held is not None:
        held.release()
    check()
    if status == 0:
        break
    reached = line
print(reached, flush=True)
"""

#: Children that take random boards are killed at random moments and replaced, again and again.
CHAOS = """
import os, random, signal, sys, time
from pathlib import Path
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
marks, kills = Path(sys.argv[1]), int(sys.argv[2])
choices = tuple((DeviceLock(f"GPU-{board}"),) for board in range(4))

def lives(pid):
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    # Who dies loses its files some time before it is seen to be dead, but is marked as ending before that
    # (PF_EXITING in the ninth field, see proc_pid_stat(5)).
    return state not in "ZX" and not int(fields[5]) & 4

def child():
    rng = random.Random(os.getpid())
    while True:
        held = acquire(LockRequest((), rng.randint(1, 4), choices), 60)
        mine = [marks / claim.device for claim in held.locks]
        for mark in mine:
            # What a killed one has left is no holder.
            if mark.exists() and lives(int(mark.read_text() or "0")):
                os._exit(3)
            mark.write_text(str(os.getpid()))
        time.sleep(rng.uniform(0, 0.01))
        if any(mark.read_text() != str(os.getpid()) for mark in mine):
            os._exit(3)
        for mark in mine:
            mark.write_text("")
        held.release()

def kill(victim):
    os.kill(victim, signal.SIGKILL)
    return os.waitpid(victim, 0)[1] == signal.SIGKILL

children = [os.fork() or child() for _ in range(6)]
killed = []
for _ in range(kills):
    time.sleep(random.uniform(0, 0.03))
    killed.append(kill(children.pop(random.randrange(6))))
    children.append(os.fork() or child())
killed += [kill(victim) for victim in children]
assert all(killed), "two holders"
acquire(LockRequest((), 4, choices), 0.0).release()
"""

#: Holds a board, or the CPU, with a rank on it, as pytest does. The rank starts a process in a
#: session of its own.
WITH_RANKS = """
import os, sys, time
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import CPU, DeviceLock
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.leases import LeaseKeeper
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.ranks.workload import call_workload

def daemon(wanted):
    import os, time
    child = os.fork() if wanted else 0
    if wanted and child == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return child

pool = RankPool(60.0, "spawn", "backend")
keeper = LeaseKeeper(pool)
also = () if sys.argv[2] == CPU else (DeviceLock(CPU, shared=True),)
lease = keeper.lease(Lease((sys.argv[2],)), 10.0, "t", also)
group = pool.get_ranks(plan_processes(Capabilities(data=True), None, lease, [0], 1))
work = call_workload(group, daemon, (sys.argv[1] == "daemon",), {}, 60)
work.run_round()
print(group.ranks[0].pid, *work.results(), flush=True)
if sys.argv[1] == "idle":
    keeper.finish_test()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what a killed pytest leaves from other runs on this machine, which would end it."""
    path = tempfile.mkdtemp(prefix="llenergy-test-")
    monkeypatch.setenv("TMPDIR", path)
    yield
    shutil.rmtree(path, ignore_errors=True)


def run(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("device", "least"), [("free", 100), ("taken", 300)])
def test_a_death_at_any_line_leaves_the_device_free(locks: Path, device: str, least: int) -> None:
    """While it is taken and freed, and while others have it: looking, queueing, giving up."""
    assert int(run(LINES, device)) > least
    directory = LockDirectory(locks, os.open(locks, os.O_RDONLY))
    assert list_entries(directory, ("waiting", "firm", "holding")) == []
    directory.close()
    assert [name for name in tickets(locks) if "-new-" not in name] == []


def test_random_deaths_never_make_two_holders_and_leave_all_free(locks: Path, tmp_path: Path) -> None:
    run(CHAOS, str(tmp_path), "100")


def is_answered(waiting: Locker) -> bool:
    return bool(waiting.answer() == {"held": ["GPU-a"]})


def test_a_killed_waiter_blocks_nobody(make: MakeLocker, locks: Path) -> None:
    holder, ahead, waiting = make(), make(), make()
    holder.take("GPU-a")
    ahead.ask("GPU-a")
    until(lambda: len(tickets(locks, "waiting")) == 1)
    waiting.ask("GPU-a")
    until(lambda: len(tickets(locks, "waiting")) == 2)
    ahead.kill()
    assert waiting.is_silent_for(0.3)
    holder.kill()
    assert is_answered(waiting)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_ranks_of_a_killed_pytest_free_their_board_when_they_are_gone(make: MakeLocker, state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS, state, "GPU-a"], stdout=subprocess.PIPE
    ) as pytest_:
        assert pytest_.stdout is not None
        rank = int(pytest_.stdout.readline().split()[0])
        waiting = make()
        if state == "busy":
            waiting.ask("GPU-a")
            assert waiting.is_silent_for(0.3)
        pytest_.kill()
        if state == "idle":
            waiting.ask("GPU-a")
        assert is_answered(waiting)
        # It loses the lock before it is seen to be dead.
        until(lambda: is_gone(rank))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_unwatched(pytest_: subprocess.Popen[bytes], rank: int) -> None:
    """Pytest, and before it those two that would end what ranks leave behind."""
    supervisor = parent(rank)
    guard = parent(supervisor)
    assert parent(guard) == pytest_.pid
    # It would end them as soon as its guard is gone.
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: is_gone(rank))
    pytest_.kill()
    pytest_.wait()


def test_processes_of_a_rank_end_with_pytest_and_then_free_the_board(make: MakeLocker) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS, "daemon", "GPU-a"], stdout=subprocess.PIPE
    ) as pytest_:
        assert pytest_.stdout is not None
        rank, daemon = map(int, pytest_.stdout.readline().split())
        waiting = make()
        waiting.ask("GPU-a")
        assert waiting.is_silent_for(0.3)
        pytest_.kill()
        assert is_answered(waiting)
        # It loses the lock before it is seen to be dead.
        until(lambda: is_gone(rank) and is_gone(daemon))


def test_a_process_left_after_the_supervisor_was_killed_keeps_its_board(make: MakeLocker) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS, "daemon", "GPU-a"], stdout=subprocess.PIPE
    ) as pytest_:
        assert pytest_.stdout is not None
        rank, daemon = map(int, pytest_.stdout.readline().split())
        try:
            kill_unwatched(pytest_, rank)
            told = make().refused("GPU-a", wait_s=0.3)
            assert f"GPU-a: held by what process {pytest_.pid} left running of " in told
            waiting = make()
            waiting.ask("GPU-a")
            assert waiting.is_silent_for(0.5)
            other = make()
            other.take("cpu", wait_s=0.0)
            told = make().refused("cpu")
            assert told.startswith(f"gpus: waited 0 s for cpu: held by process {other.pid} of ")
            assert "left running" not in told
        finally:
            os.kill(daemon, signal.SIGKILL)
        assert is_answered(waiting)


def test_processes_of_a_cpu_rank_keep_nothing(make: MakeLocker) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS, "daemon", "cpu"], stdout=subprocess.PIPE
    ) as pytest_:
        assert pytest_.stdout is not None
        rank, daemon = map(int, pytest_.stdout.readline().split())
        try:
            kill_unwatched(pytest_, rank)
            make().take("GPU-a", ("cpu", True), wait_s=1.0)
            assert not is_gone(daemon)
        finally:
            os.kill(daemon, signal.SIGKILL)


def test_a_rank_that_is_killed_alone_frees_nothing(make: MakeLocker) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_RANKS, "busy", "GPU-a"], stdout=subprocess.PIPE
    ) as pytest_:
        assert pytest_.stdout is not None
        os.kill(int(pytest_.stdout.readline().split()[0]), signal.SIGKILL)
        time.sleep(0.1)
        assert "held by process" in make().refused("GPU-a", wait_s=0.1)
        pytest_.kill()
