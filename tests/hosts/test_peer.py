# SPDX-License-Identifier: Apache-2.0
"""Calls to real agents, and what becomes of an agent that is killed, stopped, or late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_llenergy.errors import DeviceError, LLEnergyError, MeterError, WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.remote_host import RemoteHost, accept_agents

from .agents import PATIENCE_S, PATIENT, SHIFT_S, await_end, gang, needs_another_host, start_agent


@pytest.fixture(scope="module")
def shared() -> Iterator[RemoteHost]:
    """A host for tests that leave it usable."""
    with gang(None) as [host]:
        yield host


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "message", "details"),
    [
        ("trial.fail", ["meter"], MeterError, "no meter opens", ""),
        ("trial.fail", ["worker"], WorkerError, "a rank failed", "its traceback"),
        ("trial.fail", ["x"], WorkerError, "ValueError: unexpected", "raise ValueError"),
        # Such as a user's meter may raise.
        ("trial.fail", ["mute"], DeviceError, "DeviceError", ""),
        ("trial.echo", [1, 2], WorkerError, "TypeError", "echo"),
        ("trial.unsendable", [], WorkerError, "", "pickle"),
        ("trial.unknown", [], WorkerError, "AttributeError", "unknown"),
    ],
)
def test_an_error_names_the_host_and_leaves_the_agent_usable(
    shared: RemoteHost,
    method: str,
    arguments: list[object],
    kind: type[LLEnergyError],
    message: str,
    details: str,
) -> None:
    with pytest.raises(kind) as caught:
        shared.call(method, 60.0, *arguments)
    assert type(caught.value) is kind
    first, _, rest = str(caught.value).partition("\n")
    assert first.startswith(f"host0: {message}")
    assert details in rest
    assert shared.call("trial.echo", 60.0, value=1) == 1


def test_a_late_answer_is_an_error_and_not_the_answer_to_the_next_call(
    shared: RemoteHost, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=r"^host0: no answer within 0\.05 s$"):
        shared.call("trial.await_file", 0.05, path=str(tmp_path / "late"))
    (tmp_path / "late").touch()
    assert shared.call("trial.echo", 60.0, value=2) == 2
    assert shared.lost is None


def test_objects_and_the_clock_do_not_wait_for_each_other(shared: RemoteHost) -> None:
    # Longer than three beats: both sides hear each other although nobody asks anything.
    seconds = timeouts.MISSED_S + 0.5
    sleeping = shared.begin("trial.sleep", seconds=seconds)
    begin_s = time.monotonic()
    shared.exchange()
    shared.call("ranks.free_ports", 60.0)
    assert time.monotonic() - begin_s < seconds
    sleeping.result(60.0)
    assert shared.lost is None


class WatchedLine(ClockLine):
    """Counts groups of exchanges that began before the previous one had ended."""

    overlapping = 0
    ended_ns = 0

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        self.overlapping += exchanges[0].sent_ns < self.ended_ns
        self.ended_ns = exchanges[-1].received_ns
        return super().add(exchanges)


def test_many_threads_may_compare_the_clocks(shared: RemoteHost, monkeypatch: pytest.MonkeyPatch) -> None:
    line = WatchedLine()
    monkeypatch.setattr(shared, "clock", line)
    begin_ns = time.monotonic_ns()
    threads = [threading.Thread(target=lambda: [shared.exchange() for _ in range(100)]) for _ in range(3)]
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


@pytest.mark.parametrize("filled", [False, True], ids=["idle", "full connection"])
@pytest.mark.slow
def test_a_stopped_agent_is_lost_after_three_missed_beats(filled: bool) -> None:
    with gang(None) as [host]:
        begin_s = time.monotonic()
        os.kill(host.facts.pid, signal.SIGSTOP)
        try:
            while filled and host.lost is None:
                with suppress(WorkerError):
                    host.call("trial.echo", 0.0, value=b"x" * (15 << 20))
            with pytest.raises(WorkerError) as caught:
                host.call("trial.echo", 60.0, value=1)
        finally:
            # It finds its connection ended.
            os.kill(host.facts.pid, signal.SIGCONT)
        noticed_s = time.monotonic() - begin_s
        assert str(caught.value) == host.lost == "host0: its agent has not answered for 3 s"
        print(f"noticed after {noticed_s:.2f} s")
        # Its last beat was up to a second ago; on a busy machine it was late.
        assert noticed_s >= timeouts.MISSED_S - 2 * timeouts.BEAT_S


@pytest.mark.parametrize("data", [b"\0\0\0\4nope", b"GET / HTTP/1.1\r\n\r\n"])
def test_an_agent_that_sends_garbage_is_lost(data: bytes) -> None:
    with gang(None) as [host]:
        with pytest.raises(WorkerError, match=r"^host0: its agent (sent something that is no|has closed)"):
            host.call("trial.garbage", 60.0, data=data)
        assert host.lost is not None


def test_a_closed_host_says_so_and_closes_once() -> None:
    with gang(None) as [host]:
        host.close()
        host.close()
        with pytest.raises(WorkerError, match=r"^host0: its agent was ended$"):
            host.call("trial.echo", 60.0, value=1)


@needs_another_host
def test_hosts_of_a_gang_have_their_own_names_and_clocks() -> None:
    with gang(None, "n2") as [here, there]:
        assert there.facts.host == "n2" != here.facts.host
        assert there.facts.boot_id == here.facts.boot_id
        now_ns = time.monotonic_ns()
        assert abs(here.clock.to_remote(now_ns) - now_ns) < 10**8
        assert abs(there.clock.to_remote(now_ns) - now_ns - SHIFT_S * 10**9) < 10**8


def test_an_agent_that_never_comes_ends_the_others() -> None:
    listener = Listener()
    first = start_agent(listener.invitation, 0)

    def explain() -> str | None:
        has_first = any(thread.name == "llenergy-n1" for thread in threading.enumerate())
        return "srun: node n2 is down" if has_first else None

    with pytest.raises(WorkerError, match=r"^no agent has started on n2: srun: node n2 is down$"):
        accept_agents(listener, ["n1", "n2"], 60.0, explain)
    assert "pytest has closed its connection" in await_end(first)


def test_all_agents_that_are_missing_are_named() -> None:
    with pytest.raises(WorkerError, match=r"^no agent has started on n1, n2: no connection within"):
        accept_agents(Listener(), ["n1", "n2"], 0.1)
