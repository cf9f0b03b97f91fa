# SPDX-License-Identifier: Apache-2.0
"""Leases of one pytest process: of its running test, and of the ranks that stay for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.leases import LeaseKeeper
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import RankPool

from ..devices.lockers import MakeLocker, lockers

ANY = tuple(Lease((name,)) for name in ("a", "b"))
CPU_LEASE = Lease((CPU,))


class Session:
    """One pytest process: its pool and its keeper, with tests that use ranks or do not."""

    def __init__(self) -> None:
        self.pool = RankPool(60.0, "spawn", "module")
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


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_without_ranks_a_lease_ends_with_its_test(session: Session, make: MakeLocker) -> None:
    session.keeper.lease(Lease(("a",)), 0.0)
    assert "held by process" in make().refused("a")
    session.keeper.finish_test()
    make().take("a", wait_s=0.0)


def test_warm_ranks_keep_their_lease_for_the_next_test_that_can_use_them(
    session: Session, make: MakeLocker
) -> None:
    other = make()
    other.take("a")
    first = session.test(Lease(("a",), choices=ANY))
    other.release()
    assert "(idle ranks of t)" in make().refused("b")
    assert session.keeper.lease(Lease(("a",), choices=ANY), 0.0, "second").devices == ("b",)
    assert "(second)" in make().refused("b")
    assert session.ranks(Lease(("b",))) == first


def test_idle_ranks_give_way_to_who_queues_for_their_devices(session: Session, make: MakeLocker) -> None:
    (pid,) = session.test(Lease(("a",)))
    other = make()
    other.take("b")
    other.release()
    assert not is_gone(pid)
    # Either would do, and none is free.
    make().take("b")
    assert other.take(n=1, of=["a", "b"], wait_s=30.0) == ["a"]
    assert is_gone(pid)


def test_ranks_in_use_are_stopped_for_nobody_before_their_test_ends(
    session: Session, make: MakeLocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.test(Lease(("a",)))
    (pid,) = session.ranks(session.keeper.lease(Lease(("a",)), 0.0))
    monkeypatch.setattr(timeouts, "QUEUE_POLL_S", 60.0)
    waiting = make()
    waiting.ask("a")
    assert waiting.is_silent_for(1.0)
    assert not is_gone(pid)
    session.keeper.finish_test()
    assert waiting.answer() == {"held": ["a"]}
    assert is_gone(pid)


def test_who_queues_goes_before_the_next_test_on_warm_ranks(
    session: Session, make: MakeLocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "QUEUE_POLL_S", 60.0)
    (pid,) = session.test(Lease(("a",)))
    waiting = make()
    waiting.ask("a")
    assert waiting.is_silent_for(1.0)
    with pytest.raises(DeviceError, match=rf"waited 5 s for a: held by process {waiting.pid} "):
        session.keeper.lease(Lease(("a",)), 5.0)
    assert is_gone(pid)


def test_a_test_on_other_boards_stops_ranks_and_releases_their_lease_first(
    session: Session, make: MakeLocker
) -> None:
    (pid,) = session.test(Lease(("a",)))
    session.keeper.lease(Lease(("b",)), 0.0)
    assert is_gone(pid)
    make().take("a", wait_s=0.0)


def test_the_cpu_is_free_after_each_test_while_ranks_stay(session: Session, make: MakeLocker) -> None:
    for lease, also in ((CPU_LEASE, ()), (Lease(("a",)), (DeviceLock(CPU),))):
        first = session.test(lease, also=also)
        other = make()
        other.take(CPU, wait_s=0.0)
        with pytest.raises(DeviceError, match=rf"waited 0 s for cpu: held by process {other.pid} "):
            session.keeper.lease(CPU_LEASE, 0.0)
        other.release()
        assert session.test(lease, also=also) == first
