# SPDX-License-Identifier: Apache-2.0
"""Gangs of real agents with stand-ins of NVML, from one test to the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import Held, acquire
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, LeaseTimeoutError
from pytest_llenergy.hosts import gangs
from pytest_llenergy.hosts.gangs import GangKeeper, GangOptions
from pytest_llenergy.hosts.launchers import NeverError
from pytest_llenergy.ranks.pool import RankPool

from ..nvml_sim import Board, World
from .agents import Launcher

#: Board of each host: its UUID and product name.
BOARDS = {"n1": ("GPU-1", "Small"), "n2": ("GPU-2", "Large"), "n3": ("GPU-2", "Large")}


class Hosts:
    """Makes keepers of gangs on some of ``BOARDS``."""

    def __init__(self, directory: Path, library: Path, end: ExitStack) -> None:
        self._end = end
        self.environments: dict[str, dict[str, str]] = {}
        for name, (uuid, product) in BOARDS.items():
            home = directory / name
            home.mkdir(mode=0o700)
            world = end.enter_context(World(home / "world", [Board(uuid=uuid, name=product)]))
            self.environments[name] = {"LLENERGY_LOCK_DIR": str(home), **world.environment(library.parent)}

    def keeper(self, *names: str, **changes: Any) -> tuple[GangKeeper, Launcher]:
        options = replace(GangOptions(30.0, 1.0, "spawn"), **changes)
        cluster = Launcher({name: {"environment": self.environments[name]} for name in names})
        pool = RankPool(60.0, "spawn", "module")
        keeper = GangKeeper(cluster, pool, options, keeps=True)
        self._end.callback(pool.close)
        self._end.callback(keeper.close)
        return keeper, cluster

    def hold_board_of_n2(self) -> Held:
        """Lock the board of n2 as another test does; it is released at the end at the latest."""
        board = LockRequest((DeviceLock("GPU-2"),))
        held = acquire(board, 0.0, "test_other", lambda: open_lock_directory(self.environments["n2"]))
        self._end.callback(held.release)
        return held


@pytest.fixture
def hosts(tmp_path: Path, nvml_library: Path) -> Iterator[Hosts]:
    with ExitStack() as end:
        yield Hosts(tmp_path, nvml_library, end)


def lease(
    keeper: GangKeeper,
    request: GpuRequest,
    *,
    exclusive: bool = False,
    on_wait: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Return the boards, each with its host."""
    found = keeper.lease(request, "test_it", exclusive=exclusive, on_wait=on_wait)
    return [f"{each.host} {uuid}" for each in found.hosts for uuid in each.lease.uuids]


def test_the_next_test_gets_the_same_hosts_if_it_asks_for_the_same(hosts: Hosts) -> None:
    keeper, cluster = hosts.keeper("n1", "n2")
    assert lease(keeper, GpuRequest(2)) == ["n1 GPU-1", "n2 GPU-2"]
    keeper.finish_test()
    assert lease(keeper, GpuRequest(2)) == ["n1 GPU-1", "n2 GPU-2"]
    assert len(cluster.gangs) == 1
    keeper.finish_test()
    assert lease(keeper, GpuRequest(1)) == ["n1 GPU-1"]
    assert len(cluster.gangs) == 2


def test_a_host_whose_boards_do_not_fit_is_named(hosts: Hosts) -> None:
    keeper, _ = hosts.keeper("n1", "n2")
    with pytest.raises(NeverError, match=r"^n1: gpus\(1, name='large'\).*Small"):
        lease(keeper, GpuRequest(2, name="large"))


def test_one_board_on_two_hosts_is_refused(hosts: Hosts) -> None:
    keeper, _ = hosts.keeper("n2", "n3")
    with pytest.raises(DeviceError) as error:
        lease(keeper, GpuRequest(2))
    assert str(error.value) == "n2 and n3 both show GPU-2: give each board to one of them"


def test_two_agents_on_one_machine_are_refused_if_a_meter_reads_all_of_it(hosts: Hosts) -> None:
    keeper, _ = hosts.keeper("n1", "n2")
    with pytest.raises(DeviceError, match=r"^n1 and n2 are one machine, which --energy-meter would read"):
        lease(keeper, GpuRequest(2), exclusive=True)


@pytest.mark.slow
def test_a_wait_shows_the_holder_and_ends_in_time(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "WAIT_S", 0.3)
    keeper, _ = hosts.keeper("n1", "n2", lease_timeout=5.0)
    held = hosts.hold_board_of_n2()
    lines: list[str] = []
    with pytest.raises(LeaseTimeoutError, match=r"^n2: .*test_other"):
        lease(keeper, GpuRequest(2), on_wait=lines.append)
    assert len(lines) >= 2
    assert all(each.startswith("n2: ") and "test_other" in each for each in lines)
    held.release()
    assert len(lease(keeper, GpuRequest(2))) == 2


def test_an_interrupted_wait_ends_at_once(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "WAIT_S", 0.3)
    keeper, _ = hosts.keeper("n1", "n2")
    hosts.hold_board_of_n2()

    def interrupt(_: str) -> None:
        monkeypatch.setattr(gangs, "WAIT_S", 60.0)
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(KeyboardInterrupt):
            lease(keeper, GpuRequest(2), on_wait=interrupt)
    finally:
        signal.signal(signal.SIGALRM, before)
    begin_s = time.monotonic()
    keeper.close()
    # Far below the time limit of a request to an agent that still waits.
    assert time.monotonic() - begin_s < 15


def test_a_host_that_was_lost_is_not_used_again(hosts: Hosts) -> None:
    keeper, cluster = hosts.keeper("n1", "n2")
    lease(keeper, GpuRequest(2))
    agent = cluster.gangs[0].hosts[1]
    os.kill(agent.facts.pid, signal.SIGKILL)
    while agent.lost is None:
        time.sleep(0.01)
    keeper.finish_test()
    assert lease(keeper, GpuRequest(1)) == ["n1 GPU-1"]
    keeper.finish_test()
    with pytest.raises(NeverError, match=r"^n2: its agent"):
        lease(keeper, GpuRequest(2, per_host=1))


def test_machine_and_packages_of_each_host_are_known(hosts: Hosts) -> None:
    keeper, _ = hosts.keeper("n1", "n2")
    found = keeper.lease(GpuRequest(2), "test_it", exclusive=False, on_wait=lambda _: None)
    assert {name: [board.uuid for board in each.gpus] for name, each in found.environments.items()} == {
        "n1": ["GPU-1"],
        "n2": ["GPU-2"],
    }
    here = collect_environment()
    for each in found.environments.values():
        assert (each.packages, each.python) == (here.packages, here.python)
        assert each.host.cpu_model == here.host.cpu_model
        assert each.driver is not None
    keeper.finish_test()
    alone = keeper.lease(GpuRequest(1), "test_it", exclusive=False, on_wait=lambda _: None)
    assert alone.environments == {"n1": found.environments["n1"]}
