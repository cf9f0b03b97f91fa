# SPDX-License-Identifier: Apache-2.0
"""Requests to real agents, and what becomes of an agent that is killed, stopped, or late."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from pytest_llenergy.errors import DeviceError, LLEnergyError, MeterError, WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.client import AgentClient, accept_agents, close_all
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset
from pytest_llenergy.hosts.wire import Hello, Listener

from .agents import (
    PATIENCE_S,
    PATIENT,
    SHIFT_S,
    WITH_TRIAL,
    await_end,
    gang,
    needs_another_host,
    start_agent,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[AgentClient]:
    """An agent for tests that leave it usable."""
    with gang(None) as [client]:
        yield client


def test_verbs_take_and_return_primitives(shared: AgentClient) -> None:
    value = {"a": [1, 2.5, None, True, "ä", b"\0"]}
    assert shared.call("trial.echo", 60.0, value=value) == value
    assert len(shared.call("trial.bytes", 60.0, count=5_000_000)) == 5_000_000


def test_a_rank_connection_belongs_to_its_slot(shared: AgentClient) -> None:
    pending = shared.begin("trial.connect", group="g", rank=3)
    assert shared.accept_rank("g", 3, 60.0).recv() == {"rank": 3}
    pending.result(60.0)
    with pytest.raises(WorkerError, match=r"^no connection of rank 4 within 0\.1 s$"):
        shared.accept_rank("g", 4, 0.1)


@pytest.mark.parametrize(
    ("verb", "arguments", "kind", "message", "details"),
    [
        ("trial.fail", {"how": "meter"}, MeterError, "no meter opens", ""),
        ("trial.fail", {"how": "worker"}, WorkerError, "a rank failed", "its traceback"),
        ("trial.fail", {"how": "x"}, WorkerError, "ValueError: unexpected", "raise ValueError"),
        # Such as a user's meter may raise.
        ("trial.fail", {"how": "mute"}, DeviceError, "DeviceError", ""),
        ("trial.fail", {"how": "broken"}, WorkerError, "_BrokenError", "raise _BrokenError"),
        ("trial.echo", {"vlaue": 1}, WorkerError, "TypeError", "vlaue"),
        ("trial.object", {}, WorkerError, "TypeError: Encoding objects of type object", "Traceback"),
        ("trial.bytes", {"count": 20 << 20}, WorkerError, "a message of 20971", ""),
        ("trial.unknown", {}, WorkerError, "its agent has no verb trial.unknown", ""),
        ("unknown.verb", {}, WorkerError, "its agent has no service for unknown.verb", ""),
    ],
)
def test_an_error_names_the_host_and_leaves_the_agent_usable(
    shared: AgentClient,
    verb: str,
    arguments: dict[str, object],
    kind: type[LLEnergyError],
    message: str,
    details: str,
) -> None:
    with pytest.raises(kind) as caught:
        shared.call(verb, 60.0, **arguments)
    assert type(caught.value) is kind
    first, _, rest = str(caught.value).partition("\n")
    assert first.startswith(f"host0: {message}")
    assert details in rest
    assert shared.call("trial.echo", 60.0, value=1) == 1


def test_arguments_that_cannot_be_sent_are_the_callers_error(shared: AgentClient) -> None:
    with pytest.raises(TypeError):
        shared.begin("trial.echo", value=object())
    with pytest.raises(WorkerError, match="at most"):
        shared.begin("trial.echo", value=b"x" * (20 << 20))
    assert shared.call("trial.echo", 60.0, value=1) == 1


def test_a_late_answer_is_an_error_and_not_the_answer_to_the_next_request(
    shared: AgentClient, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=r"^host0: no answer to trial\.await_file within 0\.05 s$"):
        shared.call("trial.await_file", 0.05, path=str(tmp_path / "late"))
    (tmp_path / "late").touch()
    assert shared.call("trial.echo", 60.0, value=2) == 2
    assert shared.lost is None


def test_services_and_the_clock_do_not_wait_for_each_other(shared: AgentClient) -> None:
    # Longer than three beats: both sides hear each other although nobody asks anything.
    seconds = timeouts.MISSED_S + 0.5
    sleeping = shared.begin("trial.sleep", seconds=seconds)
    begin_s = time.monotonic()
    shared.exchange()
    shared.call("host.adopt", 60.0, settings=msgspec.to_builtins(shared.facts.settings))
    assert time.monotonic() - begin_s < seconds
    sleeping.result(60.0)
    assert shared.lost is None


def test_many_threads_may_ask(shared: AgentClient) -> None:
    wrong: list[int] = []

    def ask(start: int) -> None:
        for number in range(start, start + 50):
            if shared.call("trial.echo", 60.0, value=number) != number:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(1000 * each,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


class WatchedLine(ClockLine):
    """Counts groups of exchanges that began before the previous one had ended."""

    overlapping = 0
    ended_ns = 0

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        self.overlapping += exchanges[0].sent_ns < self.ended_ns
        self.ended_ns = exchanges[-1].received_ns
        return super().add(exchanges)


def test_many_threads_may_compare_the_clocks(shared: AgentClient, monkeypatch: pytest.MonkeyPatch) -> None:
    line = WatchedLine()
    monkeypatch.setattr(shared, "clock", line)
    begin_ns = time.monotonic_ns()

    def compare() -> None:
        for _ in range(100):
            shared.exchange()

    threads = [threading.Thread(target=compare) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert line.overlapping == 0
    assert line.fault(begin_ns, time.monotonic_ns()) is None


def test_a_killed_agent_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not because it misses beats.
    monkeypatch.setattr(timeouts, "MISSED_S", PATIENCE_S)
    with gang(None, None, program=PATIENT) as [lost, other]:
        pending = lost.begin("trial.sleep", seconds=60)
        begin_s = time.monotonic()
        os.kill(lost.facts.pid, signal.SIGKILL)
        while lost.lost is None:
            time.sleep(0.001)
        noticed_s = time.monotonic() - begin_s
        for ask in (
            lambda: pending.result(60.0),
            lambda: lost.call("trial.echo", 60.0, value=1),
            lost.exchange,
        ):
            with pytest.raises(WorkerError) as caught:
                ask()
            assert str(caught.value) == lost.lost == "host0: its agent has closed its connection"
        assert other.call("trial.echo", 60.0, value=1) == 1
    print(f"noticed after {noticed_s * 1e3:.1f} ms")
    assert noticed_s < PATIENCE_S / 2


@pytest.mark.parametrize("filled", [False, True], ids=["idle", "full pipe"])
@pytest.mark.slow
def test_a_stopped_agent_is_lost_after_three_missed_beats(filled: bool) -> None:
    with gang(None) as [client]:
        begin_s = time.monotonic()
        os.kill(client.facts.pid, signal.SIGSTOP)
        while filled and client.lost is None:
            with suppress(WorkerError):
                client.call("trial.echo", 0.0, value=b"x" * (15 << 20))
        with pytest.raises(WorkerError) as caught:
            client.call("trial.echo", 60.0, value=1)
        noticed_s = time.monotonic() - begin_s
        assert str(caught.value) == client.lost
        assert re.fullmatch("host0: its agent has not (answered|read) for 3 s", str(client.lost))
        print(f"noticed after {noticed_s:.2f} s")
        # Its last beat was up to a second ago; on a busy machine it was late.
        assert noticed_s >= timeouts.MISSED_S - 2 * timeouts.BEAT_S
        # It finds its connection ended.
        os.kill(client.facts.pid, signal.SIGCONT)


@pytest.mark.parametrize("data", [b"\0\0\0\4nope", b"GET / HTTP/1.1\r\n\r\n"])
def test_an_agent_that_sends_garbage_is_lost(data: bytes) -> None:
    with gang(None) as [client]:
        with pytest.raises(WorkerError, match=r"^host0: its agent sent something that is not a message"):
            client.call("trial.garbage", 60.0, data=data)
        assert client.lost is not None


def test_a_closed_client_says_so_and_closes_once() -> None:
    with gang(None) as [client]:
        client.close()
        client.close()
        with pytest.raises(WorkerError, match=r"^host0: its agent was ended$"):
            client.call("trial.echo", 60.0, value=1)


@needs_another_host
def test_hosts_of_a_gang_have_their_own_names_and_clocks() -> None:
    with gang(None, "n2") as [here, there]:
        assert there.facts.host == "n2" != here.facts.host
        assert there.facts.boot_id == here.facts.boot_id
        assert f"monotonic {SHIFT_S} 0" in there.facts.clock_offsets
        now_ns = time.monotonic_ns()
        assert abs(here.clock.to_remote(now_ns) - now_ns) < 10**8
        assert abs(there.clock.to_remote(now_ns) - now_ns - SHIFT_S * 10**9) < 10**8


def test_an_agent_that_never_comes_ends_the_others() -> None:
    listener = Listener()
    first = start_agent(listener.invitation, 0)

    def explain() -> str | None:
        has_first = any(thread.name == "llenergy-n1" for thread in threading.enumerate())
        return "srun: node n2 is down" if has_first else None

    with pytest.raises(WorkerError, match=r"^n2: its agent has not started: srun: node n2 is down$"):
        accept_agents(listener, ["n1", "n2"], 60.0, explain)
    assert "pytest has closed its connection" in await_end(first)
    listener.close()


@pytest.mark.slow
def test_an_agent_that_comes_early_waits_for_the_others_and_for_pytest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Many beats in the time that the agent accepts without one.
    monkeypatch.setattr(timeouts, "BEAT_S", 0.2)
    listener = Listener()
    impatient = f"from pytest_llenergy.hosts import timeouts\ntimeouts.MISSED_S = 4.0\n{WITH_TRIAL}"
    early = start_agent(listener.invitation, 1, program=impatient)
    with suppress(WorkerError):
        # What pytest is busy with.
        listener.accept(Hello("agent", 0), 6.0)
    late = start_agent(listener.invitation, 0)
    clients = accept_agents(listener, ["n1", "n2"], 60.0)
    assert [(client.name, client.slot) for client in clients] == [("n1", 0), ("n2", 1)]
    assert clients[1].call("trial.echo", 60.0, value=1) == 1
    close_all(clients)
    listener.close()
    for popen in (early, late):
        await_end(popen)


def test_all_agents_that_are_missing_are_named() -> None:
    listener = Listener()
    with pytest.raises(WorkerError, match=r"^n1, n2: their agents have not started: no connection of"):
        accept_agents(listener, ["n1", "n2"], 0.1)
    listener.close()


def test_the_limit_of_open_files_is_raised_for_many_hosts() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 8, limits[1]))
    try:
        with gang(None, None) as clients:
            assert [client.call("trial.echo", 60.0, value=1) for client in clients] == [1, 1]
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(32)]
            for each in files:
                os.close(each)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_hosts_for_the_hard_limit_of_open_files_are_refused() -> None:
    program = (
        "import resource\n"
        "from pytest_llenergy.hosts.client import accept_agents\n"
        "from pytest_llenergy.hosts.wire import Listener\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "accept_agents(Listener(), [f'n{slot}' for slot in range(100)], 1.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    refusal = (
        r"WorkerError: this process needs \d+ open files for its hosts and ranks, and may have 300: raise"
    )
    assert re.search(refusal, done.stderr), done.stderr
