# SPDX-License-Identifier: Apache-2.0
"""What a lease claims, and leases between real processes: waiting, giving up, messages."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_llenergy.devices import lockfiles
from pytest_llenergy.devices.lease import CPU, DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import LockDirectory
from pytest_llenergy.devices.lockfiles import lock_name
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.queue import describe_entries
from pytest_llenergy.devices.tickets import list_entries
from pytest_llenergy.errors import DeviceError

from .lockers import USERS, MakeLocker, needs_root, tickets, until

GPU = "GPU-a1b2c300-51d0-4c1f-9e70-0000005e11f0"
ME = pwd.getpwuid(os.geteuid()).pw_name
CLOCK = r"\d\d:\d\d:\d\d"


def test_a_second_process_waits_until_the_holder_is_killed(make: MakeLocker) -> None:
    first, second = make(), make()
    first.take(GPU)
    second.ask(GPU)
    assert second.is_silent_for(0.4)
    first.kill()
    assert second.answer() == {"held": [GPU]}


def test_a_lease_leaves_other_devices_free(make: MakeLocker) -> None:
    make().take(GPU)
    assert make().take("cpu", f"{GPU}1", wait_s=0.0) == ["cpu", f"{GPU}1"]


def test_of_several_choices_the_first_free_one_is_leased(make: MakeLocker) -> None:
    boards = ["a", "b", "c"]
    assert make().take(n=2, of=boards, wait_s=0.0) == ["a", "b"]
    assert make().take(n=1, of=boards, wait_s=0.0) == ["c"]


def test_a_request_takes_all_devices_or_none(make: MakeLocker) -> None:
    first, second, third = make(), make(), make()
    first.take("b")
    assert second.refused("a", "b").startswith("gpus: waited 0 s for a, b: b held by process ")
    assert third.take("a", wait_s=0.0) == ["a"]


def test_an_instance_and_its_board_exclude_each_other_and_two_instances_do_not(make: MakeLocker) -> None:
    first, second, board = make(), make(), make()
    first.take("MIG-a", ("GPU-b", True))
    assert second.take("MIG-c", ("GPU-b", True), wait_s=0.0) == ["MIG-c", "GPU-b"]
    refused = board.refused("GPU-b", wait_s=0.1)
    assert refused.startswith(f"gpus: waited 0.1 s for GPU-b: held by process {first.pid} of ")
    assert f"; held by process {second.pid} of " in refused
    first.release()
    second.release()
    board.take("GPU-b", wait_s=0.0)
    assert "for MIG-a: GPU-b held by process" in first.refused("MIG-a", ("GPU-b", True))


def test_a_process_that_holds_gets_a_part_at_once_and_never_waits_for_more(make: MakeLocker) -> None:
    holder = make()
    holder.take("a", "b")
    assert holder.take("b", wait_s=0.0) == ["b"]
    holder.release()
    assert make().refused("b").startswith("gpus: waited 0 s for b: ")
    start_s = time.monotonic()
    assert holder.refused("b", "c", wait_s=60.0) == (
        "gpus: this process already holds a, b and requests b, c; request all devices at once: to hold some "
        "while waiting for others can deadlock"
    )
    assert time.monotonic() - start_s < 30


def test_a_forked_child_of_the_holder_does_not_keep_the_lease(make: MakeLocker) -> None:
    """It is no user of the device: a helper that outlives its test must not lock the next one out."""
    held = acquire(LockRequest((DeviceLock(GPU),)), 0.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held.release()
        os.write(write, b"1")
        time.sleep(600)
        os._exit(0)
    try:
        # It has closed what it inherited.
        assert os.read(read, 1) == b"1"
        assert make().refused(GPU).startswith("gpus: waited 0 s")
        held.release()
        make().take(GPU, wait_s=0.0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


class TestMessages:
    def test_the_holder_is_named_with_user_time_and_test(self, make: MakeLocker) -> None:
        holder = make()
        holder.take(GPU, test="benchmarks/test_x.py::test_y")
        message = make().refused(GPU, wait_s=0.2)
        assert re.fullmatch(
            rf"gpus: waited 0\.2 s for {GPU}: held by process {holder.pid} of {ME} since {CLOCK} "
            r"\(benchmarks/test_x\.py::test_y\); wait for it, or raise --energy-lease-timeout",
            message,
        )

    def test_every_holder_and_everybody_ahead_is_named(self, make: MakeLocker, locks: Path) -> None:
        first, second, ahead, last = make(), make(), make(), make()
        first.take("a", "c")
        second.take("b")
        ahead.ask("a", "b", test="t")
        until(lambda: bool(tickets(locks, "waiting")))
        told = last.refused(n=1, of=["a", "b"], wait_s=0.1)
        since = rf"of {ME} since {CLOCK}"
        assert re.fullmatch(
            rf"gpus: waited 0\.1 s for 1 of a, b: a held by process {first.pid} {since}; b held by process "
            rf"{second.pid} {since}; queued before: process {ahead.pid} {since} \(t\); "
            "wait for it, or raise --energy-lease-timeout",
            told,
        )

    @needs_root
    def test_the_name_of_another_user_comes_from_the_kernel(self, make: MakeLocker, locks: Path) -> None:
        make(USERS[0]).take("a")
        make(54321).take("b", test="two\nlines")
        told = make(USERS[1]).refused("a", "b")
        assert f" of {pwd.getpwuid(USERS[0]).pw_name} since " in told
        assert re.search(r" of uid 54321 since [\d:]+ \(two\?lines\); wait", told)

    def test_the_whole_queue_can_be_described(self, make: MakeLocker, locks: Path) -> None:
        holder, waiting = make(), make()
        holder.take("MIG-a", ("GPU-b", True), test="t")
        waiting.ask("GPU-b")
        until(lambda: bool(tickets(locks, "waiting")))
        directory = LockDirectory(locks, os.open(locks, os.O_RDONLY))
        held, awaited = describe_entries(list_entries(directory, ("waiting", "firm", "holding")))
        directory.close()
        assert re.fullmatch(rf"MIG-a held by process {holder.pid} of {ME} since {CLOCK} \(t\)", held)
        assert re.fullmatch(rf"GPU-b awaited by process {waiting.pid} of {ME} since {CLOCK}", awaited)

    def test_the_holder_of_a_lock_without_a_ticket_is_unidentified(
        self, make: MakeLocker, locks: Path
    ) -> None:
        make().take("a")
        (ticket,) = tickets(locks, "holding")
        (locks / ticket).unlink()
        assert make().refused("a") == (
            "gpus: waited 0 s for a: held by a process without a ticket; wait for it, or raise "
            "--energy-lease-timeout"
        )

    def test_the_cpu_is_named_if_it_is_awaited(self, make: MakeLocker, locks: Path) -> None:
        make().take("cpu")
        (ticket,) = tickets(locks, "holding")
        (locks / ticket).unlink()
        assert make().refused("a", ("cpu", True)) == (
            "gpus: waited 0 s for a: cpu held by a process without a ticket; wait for it, or "
            "raise --energy-lease-timeout"
        )

    def test_processes_left_by_a_dead_holder_are_named(self, make: MakeLocker) -> None:
        leaver = subprocess.Popen([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True)
        with leaver:
            assert leaver.stdout is not None
            left = int(leaver.stdout.readline())
            leaver.wait()
        try:
            told = make().refused("a")
            assert f"for a: held by what process {leaver.pid} left running of {ME} since " in told
        finally:
            os.kill(left, 9)
        until(lambda: "held" in answer_of(make, "a"))


LEAVE = """
import os, subprocess
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.locks import acquire
held = acquire(LockRequest((DeviceLock("a"),)), 0)
child = subprocess.Popen(["sleep", "60"], pass_fds=held.lend_descriptors(), stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
held.release()
"""


def answer_of(make: MakeLocker, device: str) -> dict[str, object]:
    locker = make()
    locker.ask(device, wait_s=0.0)
    answer: dict[str, object] = locker.answer()
    return answer


class TestCleaning:
    def test_a_released_lease_leaves_its_lock_file_and_no_ticket(self, locks: Path) -> None:
        acquire(LockRequest((DeviceLock(GPU),)), 0.0).release()
        assert [path.name for path in locks.iterdir()] == [lock_name(GPU)]

    def test_a_wait_that_times_out_leaves_no_ticket(self, make: MakeLocker, locks: Path) -> None:
        make().take("a")
        make().refused("a", wait_s=0.1)
        assert len(tickets(locks)) == 1

    def test_a_dead_ticket_blocks_nobody_and_is_removed_by_its_user(
        self, make: MakeLocker, locks: Path
    ) -> None:
        holder, dead = make(), make()
        holder.take("a")
        dead.ask("a", "b")
        until(lambda: bool(tickets(locks, "waiting")))
        dead.kill()
        assert make().take("b", wait_s=0.0) == ["b"]
        assert tickets(locks, "waiting") == []

    def test_a_device_that_was_removed_by_a_cleaner_is_still_exclusive(
        self, make: MakeLocker, locks: Path
    ) -> None:
        """Who waits for a file that is gone must not believe to have the device when it gets its lock."""
        first, second = make(), make()
        first.take("a")
        second.ask("a")
        until(lambda: bool(tickets(locks, "waiting")))
        first.release()
        assert second.answer() == {"held": ["a"]}
        (locks / lock_name("a")).unlink()
        second.release()
        second.take("a", wait_s=0.0)
        with pytest.raises(DeviceError, match=rf"held by process {second.pid} "):
            acquire(LockRequest((DeviceLock("a"),)), 0.0)

    def test_a_lock_on_a_replaced_file_does_not_count(
        self, locks: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really, path = lockfiles.lock_descriptor, locks / lock_name("a")
        replaced: list[Path] = []

        def late(descriptor: int, claim: DeviceLock) -> bool:
            if not replaced:
                path.unlink()
                replaced.append(path)
            return really(descriptor, claim)

        monkeypatch.setattr(lockfiles, "lock_descriptor", late)
        directory = LockDirectory(locks, os.open(locks, os.O_RDONLY))
        descriptor = lockfiles.try_lock(directory, DeviceLock("a"))
        assert descriptor is not None
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        os.close(descriptor)
        directory.close()

    def test_a_lock_file_that_is_removed_repeatedly_is_an_error(
        self, locks: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = locks / lock_name("a")
        really = lockfiles.lock_descriptor

        def late(descriptor: int, claim: DeviceLock) -> bool:
            path.unlink()
            return really(descriptor, claim)

        monkeypatch.setattr(lockfiles, "lock_descriptor", late)
        with pytest.raises(DeviceError) as caught:
            acquire(LockRequest((DeviceLock("a"),)), 0.0)
        assert str(caught.value) == (
            f"lock file {path} is removed again and again; stop what removes it, or set LLENERGY_LOCK_DIR to "
            "another directory"
        )

    @pytest.mark.parametrize("device", ["a", CPU])
    def test_a_holder_detects_that_its_lock_file_was_removed(self, locks: Path, device: str) -> None:
        held = acquire(LockRequest((DeviceLock("b"), DeviceLock(device))), 0.0)
        part = acquire(LockRequest((DeviceLock("b"),)), 0.0)
        assert held.intact()
        assert part.intact()
        (locks / lock_name(device)).rename(locks / "elsewhere")
        assert not held.intact()
        assert not part.intact()
        held.release()

    def test_the_lock_file_of_the_cpu_is_opened_anew(self, make: MakeLocker, locks: Path) -> None:
        acquire(LockRequest((DeviceLock(CPU),)), 0.0).release()
        (locks / lock_name(CPU)).unlink()
        make().take(CPU)
        with pytest.raises(DeviceError, match="for cpu: held by process"):
            acquire(LockRequest((DeviceLock(CPU),)), 0.0)
