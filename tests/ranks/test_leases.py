# SPDX-License-Identifier: Apache-2.0
"""Leases of tests and of warm ranks, with real ranks and with other processes that queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease, LockRequest
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.lockfiles import lock_name
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.tickets import list_entries
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.leases import LeaseKeeper
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import RankPool

from ..devices.lockers import MakeLocker, lockers, tickets, until

ANY = tuple(Lease((name,)) for name in ("a", "b"))
CPU_LEASE = Lease((CPU,))


class Session:
    """One pytest process: its pool and its keeper, with tests that use ranks or do not."""

    def __init__(self) -> None:
        self.pool = RankPool(60.0, "spawn", "backend")
        self.keeper = LeaseKeeper(self.pool)

    def ranks(self, lease: Lease) -> list[int]:
        """The pids of the ranks on a lease, started if need be."""
        group = self.pool.get_ranks(plan_processes(Capabilities(data=True), None, lease, [0], 1))
        return [rank.pid for rank in group.ranks]

    def test(self, lease: Lease, *, also: tuple[DeviceLock, ...] = ()) -> list[int]:
        """A whole test that uses ranks."""
        pids = self.ranks(self.keeper.lease(lease, 10.0, "t", also))
        self.keeper.finish_test()
        return pids


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.keeper.close()


@pytest.fixture
def make() -> Iterator[MakeLocker]:
    with lockers() as made:
        yield made


@pytest.fixture
def locks() -> Path:
    return Path(os.environ["LLENERGY_LOCK_DIR"])


def watching() -> bool:
    return any("_watch" in thread.name for thread in threading.enumerate())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_without_ranks_a_lease_ends_with_its_test(session: Session, make: MakeLocker) -> None:
    session.keeper.lease(Lease(("a",)), 0.0)
    assert "held by process" in make().refused("a")
    session.keeper.finish_test()
    make().take("a", wait_s=0.0)


def test_an_interrupted_clean_up_releases_everything(session: Session, make: MakeLocker) -> None:
    class Interrupted(BaseException):
        """As pytest-timeout's signal method raises one."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    (pid,) = session.ranks(session.keeper.lease(Lease(("a",)), 0.0))
    os.kill(pid, signal.SIGSTOP)
    group = session.pool.get_ranks(plan_processes(Capabilities(data=True), None, Lease(("a",)), [0], 1))

    def interrupt_while_it_waits() -> None:
        until(group._busy.locked)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=interrupt_while_it_waits)
    try:
        thread.start()
        with pytest.raises(Interrupted):
            session.keeper.finish_test()
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    make().take("a", wait_s=30.0)
    assert is_gone(pid)


def test_warm_ranks_keep_their_lease_for_the_next_test(session: Session, make: MakeLocker) -> None:
    first = session.test(Lease(("a",)))
    assert f"held by process {os.getpid()} " in make().refused("a")
    assert session.test(Lease(("a",))) == first


def test_ranks_are_reused_on_any_board_that_would_do(session: Session, make: MakeLocker) -> None:
    other = make()
    other.take("a")
    first = session.test(Lease(("a",), choices=ANY))
    other.release()
    assert session.keeper.lease(Lease(("a",), choices=ANY), 0.0).devices == ("b",)
    assert session.ranks(Lease(("b",))) == first


def test_waiting_processes_see_which_test_has_warm_ranks_and_since_when_they_are_idle(
    session: Session, make: MakeLocker
) -> None:
    held = rf"waited 0 s for a: held by process {os.getpid()} of \w+ since [\d:]+ \({{}}\); "
    lease = Lease(("a",))
    session.ranks(session.keeper.lease(lease, 0.0, "first"))
    assert re.search(held.format("first"), make().refused("a"))
    session.keeper.finish_test()
    assert re.search(held.format("idle ranks of first"), make().refused("a"))
    session.keeper.lease(lease, 0.0, "second")
    assert re.search(held.format("second"), make().refused("a"))
    session.keeper.finish_test()
    assert re.search(held.format("idle ranks of second"), make().refused("a"))


def test_waiting_processes_see_since_when_the_running_test_has_a_device(session: Session) -> None:
    def since_s() -> float:
        directory = open_lock_directory()
        (entry,) = list_entries(directory, ("holding",))
        directory.close()
        return entry.content.since_s

    session.test(Lease(("a",)))
    idle_s = since_s()
    session.keeper.lease(Lease(("a",)), 0.0)
    assert since_s() > idle_s


def test_idle_ranks_are_stopped_when_others_queue(session: Session, make: MakeLocker) -> None:
    (pid,) = session.test(Lease(("a",)))
    assert make().take("a", wait_s=30.0) == ["a"]
    assert is_gone(pid)
    until(lambda: not watching())


def test_idle_ranks_stay_when_others_queue_for_other_boards(session: Session, make: MakeLocker) -> None:
    first = session.test(Lease(("a",)))
    make().take("b")
    make().refused("b", wait_s=0.6)
    assert session.test(Lease(("a",))) == first


def test_ranks_in_use_are_never_stopped_for_others(session: Session, make: MakeLocker) -> None:
    session.test(Lease(("a",)))
    lease = session.keeper.lease(Lease(("a",)), 0.0)
    (pid,) = session.ranks(lease)
    waiting = make()
    waiting.ask("a")
    assert waiting.is_silent_for(0.8)
    assert not is_gone(pid)
    assert not watching()
    session.keeper.finish_test()
    assert waiting.answer() == {"held": ["a"]}
    assert is_gone(pid)


def test_a_queued_process_goes_before_a_test_that_could_use_warm_ranks(
    session: Session, make: MakeLocker, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "QUEUE_POLL_S", 60.0)
    (pid,) = session.test(Lease(("a",)))
    waiting = make()
    waiting.ask("a")
    until(lambda: bool(tickets(locks, "waiting")))
    with pytest.raises(DeviceError, match=rf"waited 5 s for a: held by process {waiting.pid} "):
        session.keeper.lease(Lease(("a",)), 5.0)
    assert is_gone(pid)


def test_a_board_that_others_queue_for_is_released_when_its_test_ends(
    session: Session, make: MakeLocker, locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "QUEUE_POLL_S", 60.0)
    (pid,) = session.ranks(session.keeper.lease(Lease(("a",)), 0.0))
    waiting = make()
    waiting.ask("a")
    until(lambda: bool(tickets(locks, "waiting")))
    session.keeper.finish_test()
    assert waiting.answer() == {"held": ["a"]}
    assert is_gone(pid)


def test_a_queued_process_goes_before_the_next_test(session: Session, make: MakeLocker, locks: Path) -> None:
    session.keeper.lease(Lease(("a",)), 0.0)
    waiting = make()
    waiting.ask("a")
    until(lambda: bool(tickets(locks, "waiting")))
    session.ranks(Lease(("a",)))
    session.keeper.finish_test()
    with pytest.raises(DeviceError, match=rf"waited 5 s for a: held by process {waiting.pid} "):
        session.keeper.lease(Lease(("a",)), 5.0)


def test_a_smaller_test_keeps_some_boards_and_releases_the_rest(session: Session, make: MakeLocker) -> None:
    pids = session.test(Lease(("a", "b")))
    assert session.keeper.lease(Lease(("a",), choices=ANY), 0.0).devices == ("a",)
    assert all(map(is_gone, pids))
    assert make().take("b", wait_s=0.0) == ["b"]
    assert make().refused("a").startswith(f"gpus: waited 0 s for a: held by process {os.getpid()} ")


def test_a_test_on_other_boards_stops_ranks_and_releases_their_lease_first(
    session: Session, make: MakeLocker
) -> None:
    (pid,) = session.test(Lease(("a",)))
    session.keeper.lease(Lease(("b",)), 0.0)
    assert is_gone(pid)
    make().take("a", wait_s=0.0)


def test_the_cpu_is_free_after_each_test_while_its_ranks_stay(session: Session, make: MakeLocker) -> None:
    first = session.test(CPU_LEASE)
    other = make()
    other.take(CPU, wait_s=0.0)
    with pytest.raises(DeviceError, match=rf"waited 0 s for cpu: held by process {other.pid} "):
        session.keeper.lease(CPU_LEASE, 0.0)
    other.release()
    session.keeper.lease(CPU_LEASE, 0.0)
    assert make().refused(CPU).startswith("gpus: waited 0 s for cpu: held by process ")
    assert session.ranks(CPU_LEASE) == first


def test_a_cpu_test_with_ranks_frees_the_boards_of_idle_ones(session: Session, make: MakeLocker) -> None:
    (pid,) = session.test(Lease(("a",)))
    session.test(CPU_LEASE)
    assert is_gone(pid)
    make().take("a", wait_s=0.0)


def test_a_cpu_test_without_ranks_leaves_idle_ones_alone(session: Session, make: MakeLocker) -> None:
    first = session.test(Lease(("a",)))
    session.keeper.lease(CPU_LEASE, 0.0)
    assert watching()
    session.keeper.finish_test()
    assert session.test(Lease(("a",))) == first


def test_the_cpu_beside_a_board_is_released_while_ranks_stay(session: Session, make: MakeLocker) -> None:
    first = session.test(Lease(("a",)), also=(DeviceLock(CPU),))
    other = make()
    other.take(CPU, wait_s=0.0)
    other.release()
    assert session.test(Lease(("a",)), also=(DeviceLock(CPU),)) == first
    other.take(CPU, wait_s=0.0)
    with pytest.raises(DeviceError, match=r"for a, cpu: cpu held by process"):
        session.keeper.lease(Lease(("a",)), 0.0, also=(DeviceLock(CPU),))
    # Not even its ranks' board is held by who waits.
    make().take("a", wait_s=0.0)


def test_ranks_that_died_keep_no_lease(session: Session, make: MakeLocker) -> None:
    (pid,) = session.ranks(session.keeper.lease(Lease(("a",)), 0.0))
    group = session.pool.get_ranks(plan_processes(Capabilities(data=True), None, Lease(("a",)), [0], 1))
    group.kill()
    session.keeper.finish_test()
    assert is_gone(pid)
    make().take("a", wait_s=0.0)


#: A CPU test with a rank.
CPU_TEST = """
import time
from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.leases import LeaseKeeper
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import RankPool
pool = RankPool(60.0, "spawn", "backend")
LeaseKeeper(pool).lease(Lease(("cpu",)), 10.0)
group = pool.get_ranks(plan_processes(Capabilities(data=True), None, Lease(("cpu",)), [0], 1))
print(group.ranks[0].pid, flush=True)
time.sleep(120)
"""


def test_the_cpu_lease_belongs_to_pytest_and_ends_with_it(make: MakeLocker) -> None:
    with subprocess.Popen([sys.executable, "-c", CPU_TEST], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        files = [each.readlink().name for each in Path(f"/proc/{pid}/fd").iterdir()]
        waiting = make()
        waiting.ask(CPU)
        waits = waiting.is_silent_for(0.2)
        os.kill(process.pid, signal.SIGKILL)
        assert waits
        assert waiting.answer() == {"held": [CPU]}
    assert not [name for name in files if name.startswith("llenergy-")]


def test_a_nested_run_shares_the_lease_of_its_test(session: Session) -> None:
    """The board is held since the test before, the host only since this one."""
    host = DeviceLock(CPU, shared=True)
    session.test(Lease(("a",)), also=(host,))
    session.keeper.lease(Lease(("a",)), 0.0, also=(host,))
    assert set(acquire(LockRequest((DeviceLock("a"), host)), 0.0).locks) == {DeviceLock("a"), host}
    with pytest.raises(DeviceError, match="this process already holds a, cpu and requests b; "):
        acquire(LockRequest((DeviceLock("b"),)), 0.0)


def test_a_removed_lock_file_is_noticed(session: Session, locks: Path) -> None:
    session.keeper.lease(Lease(("a",)), 0.0)
    assert session.keeper.is_intact()
    (locks / lock_name("a")).unlink()
    assert not session.keeper.is_intact()
