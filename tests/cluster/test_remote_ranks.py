# SPDX-License-Identifier: Apache-2.0
"""Ranks on two hosts: real agents and ranks, one host with its own name and a clock 5,000 s ahead (root)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

from pytest_llenergy.cluster.client import AgentClient, accept_agents, close_all
from pytest_llenergy.cluster.rank_service import LeaseAnswer
from pytest_llenergy.cluster.remote_host import RemoteHost
from pytest_llenergy.cluster.wire import Listener
from pytest_llenergy.devices.lease import DeviceLock, Lease, LockRequest
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, WorkerError
from pytest_llenergy.scratch import ScratchDirectory
from pytest_llenergy.workers import timeouts
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import HostDevices, ProcessPlan, plan_on_hosts
from pytest_llenergy.workers.pool import RankPool
from pytest_llenergy.workers.transport import SUPERVISOR_VARIABLE
from pytest_llenergy.workers.workload import call_workload

from ..nvml_sim import Board, World
from ..workers.groups import LIGHT, PLAIN, TORCH, leave_daemon, run
from ..workers.survivors import alive, await_none, marked
from .agents import await_end, can_be_another_host, needs_another_host, start_agent

#: Large enough that no socket buffers it.
LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Gang:
    """Two hosts as a test uses them."""

    clients: list[AgentClient]
    hosts: dict[str, RemoteHost]
    agents: list[subprocess.Popen[bytes]]
    received: Path
    locks: list[Path]

    def start(self, capabilities: Any = PLAIN) -> RankGroup:
        """Start two ranks on each host."""
        return RankGroup(plan(capabilities), self.hosts)


def plan(capabilities: Any = PLAIN, names: Sequence[str] = ("n1", "n2")) -> ProcessPlan:
    """Plan two ranks on each host."""
    holds = [HostDevices(name, Lease(devices=("cpu", "cpu")), [0, 1]) for name in names]
    return plan_on_hosts(capabilities, None, holds, 1)


@contextmanager
def open_gang(
    directory: Path,
    method: Any = "spawn",
    prefix: Sequence[str] = (),
    logs: Path | None = None,
    library: Path | None = None,
) -> Iterator[Gang]:
    """Start an agent on this host, n1, and one on n2, whose programs ``prefix`` runs.

    With the ``library`` of the stand-in for NVML, each has a board.
    """
    with ExitStack() as end:
        received = ScratchDirectory(directory)
        end.callback(received.remove)
        listener = Listener()
        end.callback(listener.close)
        agents, locks = [], []
        for slot in range(2):
            locks.append(directory / f"locks{slot}")
            locks[slot].mkdir(mode=0o700)
            own_host = {"host": "n2", "prefix": prefix} if slot and can_be_another_host() else {}
            environment = {"LLENERGY_LOCK_DIR": str(locks[slot])}
            if library is not None:
                board = Board(uuid=f"GPU-{slot}")
                world = end.enter_context(World(directory / f"world{slot}", [board]))
                environment |= world.environment(library.parent)
            popen = start_agent(listener.invitation, slot, environment=environment, **own_host)  # type: ignore[arg-type]
            end.callback(await_end, popen)
            agents.append(popen)
        clients = accept_agents(listener, ["n1", "n2"], 60.0)
        end.callback(close_all, clients)
        hosts = {each.name: RemoteHost(each, received.path, method, logs) for each in clients}
        yield Gang(clients, hosts, agents, received.path, locks)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two hosts for all tests that do not harm them."""
    with open_gang(tmp_path_factory.mktemp("gang")) as opened:
        yield opened


@pytest.fixture
def ranks(gang: Gang) -> Iterator[RankGroup]:
    """Two ranks on each host, without torch."""
    group = gang.start()
    yield group
    group.close()


@pytest.fixture
def own_gang(tmp_path: Path) -> Iterator[tuple[Gang, str]]:
    """Two hosts for a test that harms them, and the mark of all their processes."""
    with marked() as mark, open_gang(tmp_path) as opened:
        yield opened, mark


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


def test_gloo_ranks_on_two_hosts_work_together_and_stay_for_the_next_test(gang: Gang) -> None:
    pool = RankPool(60.0, "spawn", "backend")
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


def test_the_first_cause_on_any_host_is_shown_with_traceback_and_output(
    ranks: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "OTHER_RANKS_TIMEOUT_S", 30.0)
    formatted = tmp_path / "formatted"

    def work() -> None:
        class CauseError(ValueError):
            def __str__(self) -> str:
                formatted.touch()
                return "the real cause"

        print(f"this is rank {os.environ['RANK']}")
        if os.environ["RANK"] == "3":
            raise CauseError
        while not formatted.exists():
            time.sleep(0.01)
        raise RuntimeError("what came of it")

    pids = [rank.pid for rank in ranks.ranks]
    run(ranks, print, "earlier output")
    with pytest.raises(WorkerError) as caught:
        run(ranks, work)
    text = str(caught.value)
    assert text.startswith(f"rank 3 of 4 on n2 (cpu, pid {pids[3]}): CauseError: the real cause\n")
    assert "raise CauseError" in text
    assert re.search(r"\n\nranks [012], [012], [012] later: RuntimeError: what came of it$", text)
    assert caught.value.sections == tuple(
        (f"output of rank {rank}", f"this is rank {rank}") for rank in (3, 0, 1, 2)
    )
    assert not any(map(alive, pids))


def test_large_arguments_and_results_cross_and_leave_no_file(gang: Gang, ranks: RankGroup) -> None:
    def work(given: bytes) -> bytes:
        # Not all at once, which would need much memory here.
        return given[::-1] * 2 if os.environ["RANK"] in "03" else given[:1]

    given = b"ab" * (LARGE_BYTES // 4)
    first, second, third, fourth = run(ranks, work, given)
    assert (second, third) == (b"a", b"a")
    assert first == fourth == b"ba" * (LARGE_BYTES // 2)
    assert run(ranks, max, 1, 2) == [2] * 4
    supervisors = {psutil.Process(rank.pid).environ()[SUPERVISOR_VARIABLE] for rank in ranks.ranks}
    assert len(supervisors) == 2
    for directory in (gang.received, *map(Path, supervisors)):
        assert list(directory.rglob("message-*")) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os._exit(0)", "ended with exit code 0 and no result"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_is_named(ranks: RankGroup, code: str, message: str) -> None:
    pids = [rank.pid for rank in ranks.ranks]
    work = f"if os.environ['RANK'] == '2': {code}\nif os.environ['RANK'] == '3': time.sleep(300)"
    with pytest.raises(WorkerError, match=rf"^rank 2 of 4 on n2 \(cpu, pid {pids[2]}\): {message}"):
        run(ranks, exec, f"import os, time\n{work}")
    assert not any(map(alive, pids))


def test_ranks_that_hang_show_their_stacks_or_why_they_have_none(ranks: RankGroup) -> None:
    def hang_in_the_test() -> None:
        if os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ["RANK"] != "0":
            time.sleep(300)

    with pytest.raises(
        WorkerError,
        match=r"^rank 1 of 4 on n1 \(cpu\), rank 2 of 4 on n2 \(cpu\), rank 3 of 4 on n2 \(cpu\) did not "
        "answer within 0.5 s",
    ) as caught:
        run(ranks, hang_in_the_test, timeout_s=0.5)
    outputs = dict(caught.value.sections)
    for rank in (1, 2):
        assert "in hang_in_the_test" in outputs[f"output of rank {rank}"]
    assert "no stacks: the process is stopped" in outputs["output of rank 3"]


def test_a_killed_supervisor_is_named_with_its_host(gang: Gang, ranks: RankGroup) -> None:
    supervisor = psutil.Process(ranks.ranks[2].pid).ppid()
    both = [psutil.Process(supervisor).ppid(), supervisor]

    def kill_both() -> None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in both:
                os.kill(each, number)

    def work() -> None:
        if os.environ["RANK"] in "23":
            # The fork keeps the connection of its rank open.
            os.fork()
        time.sleep(300)

    timer = Timer(1.0, kill_both)
    timer.start()
    with pytest.raises(WorkerError, match=r"n2: the supervisor of the ranks \(.*\) was ended by SIGKILL"):
        run(ranks, work)
    assert gang.clients[1].lost is None
    assert run(gang.start(), max, 1, 2) == [2] * 4


def check_that_it_ends(act: Callable[[], None], group: RankGroup, message: str) -> None:
    """Act while ranks work and check the error, which is one line."""

    def work() -> None:
        print("at work", flush=True)
        time.sleep(300)

    timer = Timer(0.5, act)
    timer.start()
    with pytest.raises(WorkerError, match=message) as caught:
        run(group, work)
    assert "\n" not in str(caught.value)


def test_a_killed_agent_is_one_failure_that_names_the_host(own_gang: tuple[Gang, str]) -> None:
    gang, mark = own_gang
    group = gang.start()
    run(group, leave_daemon)
    pid = gang.clients[1].facts.pid
    check_that_it_ends(
        lambda: os.kill(pid, signal.SIGKILL),
        group,
        r"^n2: its agent has closed its connection; ranks 2, 3 of 4 ended with it$",
    )
    assert not group.alive
    with pytest.raises(WorkerError, match=r"^n2: its agent has closed its connection$"):
        gang.start()
    left = RankGroup(plan(names=["n1"]), gang.hosts)
    assert run(left, max, 1, 2) == [2] * 2
    gang.clients[0].close()
    assert await_none(mark) == {}


def test_ranks_of_a_gang_that_was_closed_are_not_used_again(own_gang: tuple[Gang, str]) -> None:
    gang, mark = own_gang
    pool = RankPool(60.0, "spawn", "backend")
    pool.use_hosts(gang.hosts)
    group = pool.get_ranks(plan())
    close_all(gang.clients)
    assert group.has_dead_rank
    with pytest.raises(WorkerError, match=r"^n1: its agent was ended$"):
        pool.get_ranks(plan())
    pool.close()
    assert await_none(mark) == {}


def test_a_frozen_agent_is_noticed_after_three_beats(own_gang: tuple[Gang, str]) -> None:
    gang, mark = own_gang
    group = gang.start()
    pid = gang.clients[1].facts.pid
    check_that_it_ends(
        lambda: os.kill(pid, signal.SIGSTOP),
        group,
        r"^n2: its agent has not answered for 3 s; ranks 2, 3 of 4 ended with it$",
    )
    os.kill(pid, signal.SIGCONT)
    close_all(gang.clients)
    assert await_none(mark) == {}


def test_a_frozen_host_is_the_cause_of_errors_about_lost_peers(own_gang: tuple[Gang, str]) -> None:
    gang, _ = own_gang
    group = gang.start()
    pid = gang.clients[1].facts.pid

    def work() -> None:
        if os.environ["RANK"] in "23":
            time.sleep(300)
        os.kill(pid, signal.SIGSTOP)
        raise RuntimeError("gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1")

    with pytest.raises(WorkerError) as caught:
        run(group, work)
    os.kill(pid, signal.SIGCONT)
    first, other = str(caught.value).splitlines()
    assert first == "n2: its agent has not answered for 3 s; ranks 2, 3 of 4 ended with it"
    assert re.fullmatch(r"ranks [01], [01] earlier: RuntimeError: gloo/.*", other)


def test_a_host_that_freezes_within_a_large_message_does_not_block(
    own_gang: tuple[Gang, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gang, _ = own_gang
    monkeypatch.setattr(timeouts, "PARTIAL_MESSAGE_TIMEOUT_S", 40)
    group = gang.start()
    pid = gang.clients[1].facts.pid
    os.kill(pid, signal.SIGSTOP)
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"^n2: its agent has not answered for 3 s; ranks 2, 3 of 4 ended"):
        run(group, len, b"x" * LARGE_BYTES)
    os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - start_s < 40


KILLED = """
import sys, time
from pathlib import Path
from tests.cluster.test_remote_ranks import leave_daemon, open_gang, run
with open_gang(Path(sys.argv[1])) as gang:
    print("agents", flush=True)
    while True:
        group = gang.start()
        run(group, leave_daemon)
        print("ranks", flush=True)
        run(group, time.sleep, 0.2)
        group.close()
"""


def check_that_nothing_survives(directory: Path, moment: str, delay_s: float) -> None:
    """Kill a pytest some time after a moment of its run, and wait until its hosts have ended everything."""
    directory.mkdir()
    with marked() as mark:
        command = [sys.executable, "-c", KILLED, str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pytest_:
            assert pytest_.stdout is not None
            while pytest_.stdout.readline().strip() != moment:
                assert pytest_.poll() is None
            time.sleep(delay_s)
            pytest_.kill()
        assert await_none(mark) == {}


def test_nothing_is_left_on_any_host_after_pytest_was_killed(tmp_path: Path) -> None:
    check_that_nothing_survives(tmp_path / "0", "ranks", 0.0)


@pytest.mark.slow
def test_nothing_is_left_whenever_pytest_is_killed(tmp_path: Path) -> None:
    # From the start of the first ranks to the end of the second ones.
    for number in range(30):
        check_that_nothing_survives(tmp_path / str(number), "agents", number / 10)


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


def test_output_is_kept_on_the_host_of_each_rank(tmp_path: Path) -> None:
    with open_gang(tmp_path, logs=tmp_path / "logs") as opened:
        group = opened.start()
        run(group, print, "earlier output")
        with pytest.raises(WorkerError) as caught:
            run(group, exec, "print('before the error'); raise ValueError")
    assert {text for _, text in caught.value.sections} == {"before the error"}
    logs = sorted((tmp_path / "logs").glob("*/*/rank*.log"), key=lambda log: log.name)
    # Hosts may share the directory.
    places = [(log.parent.parent.name, log.name) for log in logs]
    assert places == [("n1", "rank0.log"), ("n1", "rank1.log"), ("n2", "rank2.log"), ("n2", "rank3.log")]
    assert [log.read_text() for log in logs] == ["earlier output\nbefore the error\n"] * 4


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
        return host.lease(GpuRequest(n), exclusive=False, wait_s=wait_s, busy_timeout_s=1.0, test="this test")

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
