# SPDX-License-Identifier: Apache-2.0
"""Leases between real processes: who gets which devices, who waits for whom, and what is said meanwhile."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from pytest_llenergy.devices import lockdir
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.errors import DeviceError

from .lockers import USERS, MakeLocker, needs_root

GPU = "GPU-a1b2c300-51d0-4c1f-9e70-0000005e11f0"
BOARDS = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
ME = pwd.getpwuid(os.geteuid()).pw_name
SHARED_CPU = (CPU, True)

#: Keeps taking one of four boards, and the CPU as tests on GPUs do, until it is killed.
LOOP = """
import time
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
choices = tuple((DeviceLock(f"GPU-{board}"),) for board in range(4))
print(flush=True)
while True:
    held = acquire(LockRequest((DeviceLock("cpu", shared=True),), 1, choices), 60)
    time.sleep(0.05)
    held.release()
"""

#: Children take random boards and the CPU, are killed at random moments and replaced, again and again.
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
        cpu = DeviceLock("cpu", shared=rng.random() < 0.8)
        held = acquire(LockRequest((cpu,), rng.randint(0, 4), choices), 60)
        mine = [marks / lock.device for lock in held.locks if not lock.shared]
        for mark in mine:
            # What a killed one has left is no holder.
            if mark.exists() and lives(int(mark.read_text() or "0")):
                os._exit(3)
            mark.write_text(str(os.getpid()))
        time.sleep(rng.choice((0.0, 0.01, 0.3)))
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
    time.sleep(random.uniform(0, 0.1))
    killed.append(kill(children.pop(random.randrange(6))))
    children.append(os.fork() or child())
killed += [kill(victim) for victim in children]
assert all(killed), "two holders"
acquire(LockRequest((DeviceLock("cpu"),), 4, choices), 0.0).release()
"""


def test_a_request_takes_all_devices_or_none(make: MakeLocker) -> None:
    first, second, third = make(), make(), make()
    first.take("GPU-1")
    assert "GPU-1 held by" in second.refused("GPU-0", "GPU-1", wait_s=0.5)
    assert "for GPU-0, GPU-1: GPU-1 held by" in second.refused(n=2, of=["GPU-0", "GPU-1"])
    assert third.take("GPU-0", wait_s=0.0) == ["GPU-0"]


def test_who_waits_has_the_device_when_the_holder_is_killed(make: MakeLocker, locks: Path) -> None:
    first, second = make(), make()
    first.take(GPU)
    second.ask(GPU)
    assert second.is_silent_for(0.5)
    first.kill()
    assert second.answer() == {"held": [GPU]}
    make().refused(GPU)
    # The line of the killed one is gone, too.
    assert len([*locks.glob("*.holder")]) == 1


def test_a_lease_lasts_as_long_as_a_process_that_was_lent_it(make: MakeLocker) -> None:
    first, second = make(), make()
    first.take(GPU, SHARED_CPU, test="test_x")
    child = first.lend()
    first.kill()
    assert f"held by process {first.pid} of {ME}" in second.refused(GPU, wait_s=0.5)
    # The CPU is never lent.
    assert second.take(CPU, wait_s=0.0) == [CPU]
    second.release()
    second.ask(GPU)
    os.kill(child, 9)
    assert second.answer() == {"held": [GPU]}


def test_a_forked_child_of_the_holder_does_not_keep_the_lease(make: MakeLocker) -> None:
    """It is no user of the device: a helper that outlives its test must not lock the next one out."""
    held = acquire(LockRequest((DeviceLock(GPU),)), 0.0)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        assert make().refused(GPU).startswith("gpus: waited 0 s")
        held.release()
        make().take(GPU, wait_s=30.0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


class TestWaiting:
    def test_requests_without_a_common_device_never_meet(self, make: MakeLocker) -> None:
        holder, waiting, other = make(), make(), make()
        holder.take("GPU-1", SHARED_CPU)
        waiting.ask("GPU-1", "GPU-2", SHARED_CPU)
        assert waiting.is_silent_for(1.0)
        assert other.take("GPU-0", "GPU-3", SHARED_CPU, wait_s=0.0) == ["GPU-0", "GPU-3", CPU]

    def test_who_came_later_does_not_get_what_another_queues_for(self, make: MakeLocker) -> None:
        holder, waiting, later = make(), make(), make()
        holder.take("GPU-1")
        waiting.ask("GPU-0", "GPU-1")
        assert waiting.is_silent_for(1.0)
        # It is free, and queued for.
        assert f"for GPU-0: held by process {waiting.pid} of {ME} " in later.refused("GPU-0")
        holder.release()
        assert waiting.answer() == {"held": ["GPU-0", "GPU-1"]}

    @pytest.mark.parametrize("wanted", ["boards", CPU])
    def test_a_request_for_everything_is_not_starved(self, make: MakeLocker, wanted: str) -> None:
        """By six processes that keep taking one of four boards each, which they never all give back."""
        loops = [
            subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for _ in range(6)
        ]
        try:
            for loop in loops:
                assert loop.stdout is not None
                loop.stdout.readline()
            wide = make()
            for _ in range(3):
                wide.take(*([CPU] if wanted == CPU else BOARDS), wait_s=20.0)
                wide.release()
        finally:
            for loop in loops:
                with loop:
                    loop.kill()

    def test_random_deaths_never_make_two_holders_and_leave_all_free(
        self, locks: Path, tmp_path: Path
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-c", CHAOS, str(tmp_path), "60"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr


class TestShared:
    def test_the_cpu_has_many_holders_or_one(self, make: MakeLocker) -> None:
        first, second, alone = make(), make(), make()
        first.take("GPU-0", SHARED_CPU)
        second.take("GPU-1", SHARED_CPU, wait_s=0.0)
        told = alone.refused(CPU)
        assert told.count("held by process") == 2
        alone.ask(CPU)
        assert alone.is_silent_for(1.0)
        # From now on no other comes between.
        first.release()
        first.ask("GPU-0", SHARED_CPU)
        assert first.is_silent_for(0.5)
        second.release()
        assert alone.answer() == {"held": [CPU]}
        assert first.is_silent_for(0.5)
        alone.release()
        assert first.answer() == {"held": ["GPU-0", CPU]}

    def test_instances_share_their_board_and_exclude_the_whole(self, make: MakeLocker) -> None:
        first, second, whole = make(), make(), make()
        first.take("MIG-a", ("GPU-b", True))
        second.take("MIG-c", ("GPU-b", True), wait_s=0.0)
        told = whole.refused("GPU-b")
        assert all(f"held by process {each.pid} of " in told for each in (first, second))
        first.release()
        second.release()
        whole.take("GPU-b", wait_s=0.0)
        assert "for MIG-a: GPU-b held by process" in first.refused("MIG-a", ("GPU-b", True))


class TestHolders:
    def test_the_holder_is_named_with_user_time_and_test(self, make: MakeLocker) -> None:
        holder = make()
        holder.take(GPU, test="benchmarks/test_x.py::test_y")
        assert re.fullmatch(
            rf"gpus: waited 0\.2 s for {GPU}: held by process {holder.pid} of {ME} since [-\d]+ [:\d]+ "
            r"\(benchmarks/test_x\.py::test_y\); wait for it, or raise --energy-lease-timeout",
            make().refused(GPU, wait_s=0.2),
        )


@needs_root
def test_users_with_a_strict_umask_share_the_devices(make: MakeLocker) -> None:
    """Whoever has made the files, each in its turn."""
    lockers = [make(uid) for uid in USERS]
    lockers[0].take(GPU, SHARED_CPU)
    for before, after in zip(lockers, lockers[1:] + lockers[:1], strict=True):
        user = re.escape(pwd.getpwuid(USERS[0]).pw_name) if before is lockers[0] else r"uid \d+"
        assert re.search(rf"held by process {before.pid} of {user} since", make(USERS[1]).refused(GPU))
        if after is not lockers[0]:
            after.ask(GPU, SHARED_CPU)
            before.release()
            assert after.answer() == {"held": [GPU, CPU]}


class TestDirectory:
    @needs_root
    def test_one_that_others_share_is_not_replaced_by_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a directory with the mode 1770 for a user who is not in its group."""
        theirs, everybody = tmp_path / "theirs", tmp_path / "everybody"
        for path, mode in ((theirs, 0o1770), (everybody, 0o1777)):
            path.mkdir()
            path.chmod(mode)
        for path in (tmp_path, *tmp_path.parents):
            path.chmod(path.stat().st_mode | 0o011)
        monkeypatch.setattr(lockdir, "CANDIDATES", (str(tmp_path / "missing"), str(theirs), str(everybody)))
        with closing(open_lock_directory({})) as found:
            assert found.path == theirs
        program = f"""
import os
from pytest_llenergy.devices import lockdir
lockdir.CANDIDATES = {lockdir.CANDIDATES!r}
os.setgroups([])
os.setgid({USERS[1]})
os.setuid({USERS[1]})
print(lockdir.open_lock_directory({{}}).path)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert f"{theirs} is no directory to which you may write; make one" in done.stderr
        assert done.returncode == 1

    @pytest.mark.parametrize("name", ["file", "missing", "dir"])
    def test_one_that_cannot_be_used_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        (tmp_path / "dir").mkdir()
        path = name if name == "dir" else str(tmp_path / name)
        with pytest.raises(DeviceError, match=f"LLENERGY_LOCK_DIR: {path} is no directory to which you may"):
            open_lock_directory({"LLENERGY_LOCK_DIR": path})
