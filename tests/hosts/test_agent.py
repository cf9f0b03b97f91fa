# SPDX-License-Identifier: Apache-2.0
"""Real agents: how they end, whoever ends or stops, and which hosts are refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.agent import agent_command
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.remote_host import accept_agents, close_all

from ..ranks.survivors import await_none, marked, survivors
from .agents import PATIENCE_S, ROOT, await_end, gang, start_agent

#: Stands in for pytest: holds two agents, each with a process of its own, until it is killed or stopped. Its
#: argument is a program of ``agents``.
HOLDER = """
import sys, time
from tests.hosts import agents
with agents.gang(None, None, program=getattr(agents, sys.argv[1])) as clients:
    for client in clients:
        client.call("trial.start", 60.0)
    print(*(client.facts.pid for client in clients), flush=True)
    time.sleep(1000)
"""

#: Takes the place of a launcher: starts a command and waits.
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:], stdin=0)"


@pytest.fixture
def mark() -> Iterator[str]:
    """Mark the processes of a test. Returns the mark."""
    with marked() as value:
        yield value


def start_holder(program: str = "WITH_TRIAL") -> tuple[subprocess.Popen[str], list[int]]:
    """Start the stand-in for pytest. Returns it and the pids of its agents."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, program], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None
    return holder, list(map(int, holder.stdout.readline().split()))


def seconds_until_nothing_is_left(mark: str, but: int | None = None) -> float:
    """Wait until no process of the test lives, ``but`` one."""
    begin_s = time.monotonic()
    while set(survivors(mark)) - {but} and time.monotonic() - begin_s < 60:
        time.sleep(0.01)
    assert set(survivors(mark)) - {but} == set()
    return time.monotonic() - begin_s


def test_when_pytest_is_killed_its_agents_end_with_all_that_they_started(mark: str) -> None:
    # Not because they miss the beats of pytest.
    holder, _ = start_holder("PATIENT")
    # Each agent has a guard and has started a process, whose environment can be read soon after its start.
    deadline_s = time.monotonic() + 60
    while len(survivors(mark)) < 7:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    holder.kill()
    passed_s = seconds_until_nothing_is_left(mark)
    print(f"nothing left after {passed_s:.2f} s")
    assert passed_s < PATIENCE_S / 2
    holder.communicate()


def test_when_pytest_is_stopped_its_agents_end_after_three_missed_beats(mark: str) -> None:
    holder, _ = start_holder()
    begin_s = time.monotonic()
    holder.send_signal(signal.SIGSTOP)
    seconds_until_nothing_is_left(mark, but=holder.pid)
    passed_s = time.monotonic() - begin_s
    print(f"nothing left after {passed_s:.2f} s")
    # The last beat was up to a second ago; on a busy machine it was late.
    assert passed_s >= timeouts.MISSED_S - 2 * timeouts.BEAT_S
    holder.kill()
    holder.communicate()


@pytest.mark.slow
def test_kills_at_any_moment_leave_nothing(mark: str) -> None:
    generator, slowest_s = random.Random(24), 0.0
    for _ in range(30):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, "WITH_TRIAL"],
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        time.sleep(generator.uniform(0.0, 1.0))
        holder.kill()
        holder.wait()
        slowest_s = max(slowest_s, seconds_until_nothing_is_left(mark))
    print(f"nothing left after {slowest_s:.2f} s")


def launch(listener: Listener) -> subprocess.Popen[bytes]:
    """Start an agent through a launcher, with the invitation on standard input."""
    popen = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *agent_command(0)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert popen.stdin is not None
    with popen.stdin:
        popen.stdin.write(f"{listener.invitation}\n".encode())
    return popen


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_when_its_launcher_is_killed_an_agent_ends_even_if_it_is_stopped(mark: str, stopped: bool) -> None:
    listener = Listener()
    launcher = launch(listener)
    clients = accept_agents(listener, ["n1"], 60.0)
    if stopped:
        os.kill(clients[0].facts.pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    passed_s = seconds_until_nothing_is_left(mark)
    print(f"nothing left after {passed_s:.2f} s")
    close_all(clients)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_guard_ends_the_agent_and_all_that_it_started(
    mark: str, number: signal.Signals
) -> None:
    with gang(None) as [client]:
        client.call("trial.start", 60.0)
        client.popen.send_signal(number)  # type: ignore[attr-defined]
        if number == signal.SIGKILL:
            # Nobody is left to end what is no service's; ranks have guards of their own.
            client.popen.wait()  # type: ignore[attr-defined]
            end_sleepers(mark)
        assert await_none(mark) == {}


def end_sleepers(mark: str, timeout_s: float = 30.0) -> None:
    """Kill what the service has started, also what has not become its program yet, until all is gone."""
    deadline_s = time.monotonic() + timeout_s
    while (left := survivors(mark)) and time.monotonic() < deadline_s:
        for pid, command in left.items():
            if "sleep" in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def test_an_agent_reports_why_it_has_ended() -> None:
    listener = Listener()
    popen = start_agent(listener.invitation, 4)
    while (accepted := listener.accept(60.0)) is None:
        pass
    accepted.close()
    assert await_end(popen) == "pytest-llenergy agent of slot 4 ended: pytest has closed its connection\n"
    listener.close()


def test_an_agent_without_an_invitation_ends_without_showing_what_it_read() -> None:
    report = await_end(start_agent("no invitation"))
    assert "agent of slot 0 ended: " in report
    assert "no invitation" not in report


UNPRIVILEGED = ["setpriv", "--bounding-set=-sys_nice"]


@pytest.mark.skipif(os.geteuid() != 0, reason="lowering a niceness, and giving up a capability, needs root")
def test_a_higher_niceness_than_that_of_pytest_is_undone_or_refused() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with gang(None, prefix=["nice", "-n", "2"]) as [host]:
        assert host.facts.nice == own
    line = rf"^host0: niceness {own + 2}, pytest's is {own}: start Ray there with RAY_worker_niceness=0"
    with pytest.raises(WorkerError, match=line), gang(None, prefix=["nice", "-n", "2", *UNPRIVILEGED]):
        pytest.fail("it was accepted")


@pytest.mark.parametrize(
    ("program", "difference"),
    [
        (
            "import pytest_llenergy; pytest_llenergy.__version__ = '0.0.1'",
            "pytest-llenergy 0.0.1, and pytest's host",
        ),
        ("import platform; platform.python_version = lambda: '3.9.7'", "Python 3.9.7, and pytest's host"),
        (
            "import pytest_llenergy.hosts.host_facts as facts; facts.installed_version = lambda _: '0.1'",
            "torch 0.1, and pytest's host",
        ),
    ],
)
def test_a_host_with_other_versions_is_refused_and_all_agents_end(
    mark: str, program: str, difference: str
) -> None:
    refused = pytest.raises(WorkerError, match=f"^host0 has {difference} .*install the same on all hosts")
    with refused, gang(None, program=program):
        pytest.fail("it was accepted")
    assert await_none(mark) == {}
