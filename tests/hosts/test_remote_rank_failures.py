# SPDX-License-Identifier: Apache-2.0
"""Ranks, agents and whole hosts that fail while ranks on two hosts work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import psutil
import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.remote_host import close_all
from pytest_llenergy.hosts.timeouts import MISSED_S
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.pool import RankPool

from ..ranks.groups import leave_daemon, run
from ..ranks.survivors import alive, await_none, marked
from .remote_ranks import LARGE_BYTES, Gang, plan


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
    assert re.search(r"\n\nrank [012]: RuntimeError: what came of it$", text)
    assert caught.value.sections == tuple(
        (f"output of rank {rank}", f"this is rank {rank}") for rank in (3, 0, 1, 2)
    )
    assert not any(map(alive, pids))


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


@pytest.mark.slow
def test_ranks_that_hang_show_their_stacks(ranks: RankGroup) -> None:
    def hang_in_the_test() -> None:
        if os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ["RANK"] != "0":
            time.sleep(300)

    with pytest.raises(
        WorkerError,
        match=r"^rank 1 of 4 on n1 \(cpu\), rank 2 of 4 on n2 \(cpu\), rank 3 of 4 on n2 \(cpu\) did not "
        "answer within 10 s",
    ) as caught:
        run(ranks, hang_in_the_test, timeout_s=10.0)
    outputs = dict(caught.value.sections)
    for rank in (1, 2):
        assert "in hang_in_the_test" in outputs[f"output of rank {rank}"]


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
    with pytest.raises(WorkerError, match=r"n2: the supervisor of the ranks \(.*\) has ended"):
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
    pool = RankPool(60.0, "spawn", "module")
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


def test_a_frozen_host_is_the_cause_of_errors_about_lost_peers(
    own_gang: tuple[Gang, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timeouts.OTHER_HOSTS_TIMEOUT_S > MISSED_S
    # A busy machine may be late with both.
    monkeypatch.setattr(timeouts, "OTHER_HOSTS_TIMEOUT_S", 60.0)
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
    assert str(caught.value) == "n2: its agent has not answered for 3 s; ranks 2, 3 of 4 ended with it"


def test_a_host_that_freezes_within_a_large_message_does_not_block(
    own_gang: tuple[Gang, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gang, _ = own_gang
    monkeypatch.setattr(timeouts, "PARTIAL_MESSAGE_TIMEOUT_S", 5)
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
from tests.hosts.remote_ranks import open_gang
from tests.ranks.groups import leave_daemon, run
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
