# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts with real agents."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.hosts.agent_ranks import LeaseAnswer
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.ranks.workload import call_workload

from ..ranks.groups import LIGHT, TORCH, run
from ..ranks.survivors import alive
from .agents import can_be_another_host, needs_another_host
from .remote_ranks import LARGE_BYTES, Gang, open_gang, plan


def look() -> tuple[Any, ...]:
    import torch
    import torch.distributed as dist

    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return float(value), socket.gethostname(), [os.environ[name] for name in names], os.getpid()


def die_while_others_wait() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_gloo_ranks_on_two_hosts_work_together_and_stay_for_the_next_test(gang: Gang) -> None:
    pool = RankPool(60.0, "spawn", "module")
    try:
        pool.use_hosts(gang.hosts)
        group = pool.get_ranks(plan(TORCH))
        seen = run(group, look)
        assert [value for value, *_ in seen] == [10.0] * 4
        own, other = socket.gethostname(), "n2" if can_be_another_host() else socket.gethostname()
        assert [name for _, name, *_ in seen] == [own, own, other, other]
        assert [variables[:2] for _, _, variables, _ in seen] == [["0", "2"], ["1", "2"]] * 2
        assert len({tuple(variables[2:]) for _, _, variables, _ in seen}) == 1
        assert [(rank.host, rank.pid) for rank in group.ranks] == [
            (name, pid) for name, (*_, pid) in zip(("n1", "n1", "n2", "n2"), seen, strict=True)
        ]
        pool.finish_test()
        assert pool.get_ranks(plan(TORCH)) is group
        assert [pid for *_, pid in run(group, look)] == [rank.pid for rank in group.ranks]
        assert pool.devices == frozenset()
        with pytest.raises(WorkerError, match=r"^rank 3 of 4 on n2 \(.*\): was killed by SIGKILL"):
            run(group, die_while_others_wait)
        group = pool.get_ranks(plan())
        pool.use_hosts({})
        assert not any(alive(rank.pid) for rank in group.ranks)
    finally:
        pool.close()


def test_forked_ranks_work_on_two_hosts(tmp_path: Path) -> None:
    with open_gang(tmp_path, "forkserver") as opened:
        group = opened.start(LIGHT)
        assert group.start_method == "forkserver"
        assert run(group, max, 1, 2) == [2] * 4
        group.close()


def test_times_of_ranks_are_on_the_clock_of_pytest(ranks: RankGroup) -> None:
    workload = call_workload(ranks, time.sleep, (0.01,), {}, 60.0)
    start_ns = time.monotonic_ns()
    timeline = workload.run_round()
    end_ns = time.monotonic_ns()
    for rank in timeline.ranks:
        (iteration,) = rank.iterations
        assert start_ns < iteration.start_ns < iteration.end_ns < end_ns
        assert iteration.end_ns - iteration.start_ns >= 10_000_000


def test_large_arguments_and_results_cross(ranks: RankGroup) -> None:
    def work(given: bytes) -> bytes:
        # Not all at once, which would need much memory here.
        return given[::-1] * 2 if os.environ["RANK"] in "03" else given[:1]

    given = b"ab" * (LARGE_BYTES // 4)
    first, second, third, fourth = run(ranks, work, given)
    assert (second, third) == (b"a", b"a")
    assert first == fourth == b"ba" * (LARGE_BYTES // 2)
    assert run(ranks, max, 1, 2) == [2] * 4


HELPER = """
SIZE = 3
class Row:
    def __init__(self, cells):
        self.cells = cells
def make_row():
    return Row([7] * SIZE)
"""


@needs_another_host
def test_code_travels_to_a_host_that_does_not_have_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "rows_of_a_project.py").write_text(HELPER)
    monkeypatch.syspath_prepend(project)
    from rows_of_a_project import make_row  # type: ignore[import-not-found]

    def work() -> Any:
        return make_row().cells, (project / "rows_of_a_project.py").exists()

    hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{tmp_path}/project" && exec "$@"', "sh"]
    with open_gang(tmp_path, prefix=hide) as opened:
        group = opened.start()
        assert run(group, work) == [([7, 7, 7], True)] * 2 + [([7, 7, 7], False)] * 2
        group.close()


def test_an_error_shows_what_ranks_on_other_hosts_printed(tmp_path: Path) -> None:
    with open_gang(tmp_path) as opened:
        group = opened.start()
        with pytest.raises(WorkerError) as caught:
            run(group, exec, "print('before the error'); raise ValueError")
    assert {text for _, text in caught.value.sections} == {"before the error"}


def test_ranks_can_have_an_interpreter_of_their_own_on_each_host(gang: Gang) -> None:
    named = replace(plan(), python=sys.executable)
    group = RankGroup(named, gang.hosts)
    assert run(group, max, 1, 2) == [2] * 4
    group.close()
    with pytest.raises(WorkerError, match=r"^n[12]: has no interpreter /nowhere/python"):
        RankGroup(replace(named, python="/nowhere/python"), gang.hosts)


def test_devices_are_leased_on_their_own_host(tmp_path: Path, nvml_library: Path) -> None:
    with open_gang(tmp_path, library=nvml_library) as gang:
        require_own_leases(gang)


def require_own_leases(gang: Gang) -> None:
    """Require that a device is free or taken on its own host, and free again once its ranks have ended."""

    def acquire_here(number: int) -> Any:
        where = {"LLENERGY_LOCK_DIR": str(gang.locks[number])}
        board = LockRequest((DeviceLock(f"GPU-{number}"),))
        return acquire(board, 0.0, "another", lambda: open_lock_directory(where))

    def lease(host: RemoteHost, wait_s: float = 0.0, n: int = 1) -> LeaseAnswer:
        answer: LeaseAnswer = host.call("ranks.lease", 60.0, GpuRequest(n), False, wait_s, 1.0, "this test")
        return answer

    held = acquire_here(1)
    first, second = gang.hosts.values()
    assert lease(first, n=2).shortage == "gpus(2): only 1 of 1 GPUs may be used here"
    found = lease(first).lease
    assert found is not None
    assert found.uuids == ("GPU-0",)
    with pytest.raises(DeviceError, match=r"^n2: .*another"):
        lease(second)
    held.release()
    lease(second, 5.0)
    group = gang.start()
    for number in range(2):
        with pytest.raises(DeviceError, match="this test"):
            acquire_here(number)
    # The lease lasts until the supervisor has killed every rank.
    supervisor = psutil.Process(group.ranks[2].pid).parent()
    assert supervisor is not None
    open_files = [each.readlink() for each in Path(f"/proc/{supervisor.pid}/fd").iterdir()]
    assert any(each.is_relative_to(gang.locks[1]) for each in open_files)
    os.kill(gang.clients[1].facts.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^n2: "):
        run(group, time.sleep, 300)
    second.release()
    deadline_s = time.monotonic() + 60
    while True:
        try:
            acquire_here(1).release()
            break
        except DeviceError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    first.release()
    acquire_here(0).release()
