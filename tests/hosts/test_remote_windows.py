# SPDX-License-Identifier: Apache-2.0
"""Windows of ``energy_meter`` on several hosts, with real agents: what they ask, in which order and when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from pytest_llenergy.energy.meters.base import Domain, MeterSpec, within
from pytest_llenergy.energy.window import Measuring, Window
from pytest_llenergy.energy.window_meters import WindowMeters
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.client import Pending
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset
from pytest_llenergy.hosts.meter_client import MeterClient, open_remote_meters
from pytest_llenergy.hosts.remote_meters import RemoteMeters
from pytest_llenergy.hosts.remote_windows import RemoteWindows
from pytest_llenergy.measure.host_meters import HostMeters

from ..energy.waves import MS
from .metered import MeteredHost, metered_hosts


class SlowMeter:
    """A meter of a user, whose counter rises by 50 J every half a second."""

    name, poll_period_s = "slow", 0.02

    def __init__(self, uuid: str) -> None:
        domain = Domain(
            f"gpu:{uuid}",
            "measured",
            source="slow",
            scope="100 W",
            resolution_j=0.01,
            accuracy="exact",
            limits=within(0.0),
            update_period_s=0.5,
            max_age_s=None,
        )
        self.domains = [domain]

    def read(self) -> list[float]:
        return [50.0 * (time.monotonic() // 0.5)]

    def close(self) -> None:
        pass


SLOW = MeterSpec("slow", "measured", lambda targets: [SlowMeter(uuid) for uuid in targets.gpus])


class Sent:
    """The requests that are sent to hosts, by host and verb, in their order."""

    def __init__(self, hosts: Sequence[MeteredHost], monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, str, Pending]] = []
        for host in hosts:
            monkeypatch.setattr(host.client, "begin", self._watch(host))

    def _watch(self, host: MeteredHost) -> Any:
        begin = host.client.begin

        def watched(verb: str, **arguments: Any) -> Pending:
            pending = begin(verb, **arguments)
            self.requests.append((host.client.name, verb.removeprefix("windows."), pending))
            return pending

        return watched

    def take(self) -> list[tuple[str, str]]:
        """Return the requests since the last call, equal neighbours once."""
        found = [(host, verb) for host, verb, _ in self.requests]
        self.requests.clear()
        return [each for each, previous in zip(found, [None, *found], strict=False) if each != previous]

    def answered(self, verb: str) -> int:
        """Return how many requests with this verb have an answer."""
        return sum(not pending.answers.empty() for _, asked, pending in self.requests if asked == verb)


@contextmanager
def watched_windows(
    directory: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Measuring, Sent]]:
    """Yield windows on two hosts that have not started."""
    with metered_hosts(directory, library, shifted=False) as hosts:
        windows = open_remote_meters(RemoteWindows, [(host.client, [host.uuid]) for host in hosts])
        measuring = Measuring(windows)
        yield measuring, Sent(hosts, monkeypatch)
        measuring.stop()


def on_both(*verbs: str) -> list[tuple[str, str]]:
    """Return requests of which each is sent to both hosts before the next."""
    return [(host, verb) for verb in verbs for host in ("n1", "n2")]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("kind", "protocol"), [(RemoteMeters, HostMeters), (RemoteWindows, WindowMeters)])
def test_meters_of_another_host_have_no_methods_that_its_agent_cannot_answer(
    kind: type, protocol: type
) -> None:
    """A verb that the service of the agent lacks would leave the host without joules."""
    assert public(kind) - public(MeterClient) - {"service"} <= public(protocol)


def test_hosts_start_and_read_their_meters_at_the_same_time(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_windows(tmp_path, nvml_library, monkeypatch) as (measuring, sent):
        measuring.start()
        assert sent.take() == [
            (host, verb) for host in ("n1", "n2") for verb in ("longest_wait_s", "start")
        ] + on_both("infos")
        measuring.begin("first")
        # No clock is compared between the first reading and the begin of the window.
        assert sent.take() == on_both("approach", "clock", "prepare", "begin")
        measuring.end("first")
        assert sent.take()[:2] == on_both("end")


def test_joules_are_computed_early_but_in_no_window(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_windows(tmp_path, nvml_library, monkeypatch) as (measuring, sent):
        measuring.start()
        with measuring.window("around"):
            with measuring.window("first"):
                time.sleep(0.2)
            with measuring.window("second"):
                time.sleep(1)
            time.sleep(1)
            assert sent.answered("account_early") == 0
        deadline_s = time.monotonic() + 60
        while sent.answered("account_early") < 6 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        early = [pending for _, verb, pending in sent.requests if verb == "account_early"]
        found = [
            sum(energy_j for energy_j, *_ in pending.result(0)["energies"].values()) for pending in early
        ]
        first, second, around = (sum(found[i : i + 2]) for i in (0, 2, 4))
        by_name = {window.name: window for window in measuring.windows}
        for name, early_j in (("first", first), ("second", second), ("around", around)):
            window = by_name[name]
            assert abs(window.energy_j - early_j) <= 4 * window.energy_u_j


@contextmanager
def slow_windows(directory: Path, library: Path) -> Iterator[Measuring]:
    """Yield windows on one host, whose counter ticks slowly."""
    with metered_hosts(directory, library, shifted=False) as hosts:
        boards = [(host.client, [host.uuid]) for host in hosts[:1]]
        measuring = Measuring(open_remote_meters(RemoteWindows, boards, ["slow"], specs=[SLOW]))
        measuring.start()
        yield measuring
        measuring.stop()


def measure_steady(measuring: Measuring) -> Window:
    with measuring.window("steady") as window:
        time.sleep(1.2)
    return window


def require_joules(window: Window) -> None:
    assert abs(window.energy_j - 100 * window.duration_s) <= 4 * window.energy_u_j


def test_windows_wait_for_a_counter_that_ticks_slowly(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joules need three ticks after the window, which may take longer than any other answer."""
    with slow_windows(tmp_path, nvml_library) as measuring:
        window = measure_steady(measuring)
        with monkeypatch.context() as patch:
            patch.setattr(timeouts, "METER_ANSWER_TIMEOUT_S", 0.5)
            require_joules(window)


def test_rounds_wait_for_a_counter_that_ticks_slowly(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        boards = [(host.client, [host.uuid]) for host in hosts[:1]]
        (meters,) = open_remote_meters(RemoteMeters, boards, ["slow"], specs=[SLOW])
        with meters:
            after_ns = time.monotonic_ns() + 500 * MS
            with monkeypatch.context() as patch:
                patch.setattr(timeouts, "METER_ANSWER_TIMEOUT_S", 0.0)
                meters.await_ticks(after_ns, 0.0)
            assert time.monotonic_ns() > after_ns
            assert meters.reasons == []


@pytest.mark.slow
def test_a_late_answer_costs_its_window_and_not_the_host(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Pending.result

    def answer_late(pending: Pending, timeout_s: float) -> Any:
        if pending._verb.startswith("windows.account"):
            pending.answers, timeout_s = SimpleQueue(), 0.0
        return result(pending, timeout_s)

    with slow_windows(tmp_path, nvml_library) as measuring:
        window = measure_steady(measuring)
        with monkeypatch.context() as patch:
            patch.setattr(Pending, "result", answer_late)
            assert window.reason == "n1: no answer to windows.account within 0 s"
        require_joules(measure_steady(measuring))


def test_clocks_that_contradict_each_other_leave_a_window_without_joules(
    tmp_path: Path, nvml_library: Path
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        boards = [(host.client, [host.uuid]) for host in hosts]
        measuring = Measuring(open_remote_meters(RemoteWindows, boards))
        measuring.start()
        with measuring.window("before"):
            time.sleep(0.3)
        with measuring.window("jump"):
            now_ns = time.monotonic_ns()
            hosts[1].client.clock.add([Exchange(now_ns - 1000, now_ns + 50 * MS, now_ns)])
            time.sleep(0.3)
        before, jump = measuring.windows
        assert [flag.name for flag in before.flags if flag.severity == "invalid"] == []
        assert before.energy_j > 0
        (flag,) = [flag for flag in jump.flags if flag.severity == "invalid"]
        assert flag.name == "host"
        assert flag.detail.startswith("n2 has a clock that moved by 50 ms against pytest's")
        assert jump.reason == flag.detail
        assert jump.by_domain["n1/gpu:GPU-n1"].energy_j is not None
        assert jump.by_domain["n2/gpu:GPU-n2"].energy_j is None
        measuring.stop()


def test_no_joules_of_windows_are_computed_in_a_round(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metered_hosts(tmp_path, nvml_library, shifted=False) as hosts:
        boards = [(host.client, [host.uuid]) for host in hosts[:1]]
        measuring = Measuring(open_remote_meters(RemoteWindows, boards, ["slow"], specs=[SLOW]))
        measuring.start()
        sent = Sent(hosts[:1], monkeypatch)
        (meters,) = open_remote_meters(RemoteMeters, boards)
        with meters:
            with measuring.window("before"):
                time.sleep(0.1)
            # Before the counter has ticked three times, unless the machine is busy.
            meters.begin_gap()
            computed = sent.answered("account_early")
            time.sleep(2)
            assert sent.answered("account_early") == computed
            meters.end_gap()
            deadline_s = time.monotonic() + 60
            while not sent.answered("account_early") and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert sent.answered("account_early") == 1
        measuring.stop()


class DriftingLine(ClockLine):
    """A clock that has moved by 1 ms whenever it is read, which exchanges of 20 ms cannot rule out."""

    def add(self, exchanges: Sequence[Exchange]) -> Offset:
        self.moved_ns = getattr(self, "moved_ns", 0) + MS
        return super().add(
            [
                Exchange(each.sent_ns - 10 * MS, each.remote_ns + self.moved_ns, each.received_ns + 10 * MS)
                for each in exchanges
            ]
        )


def test_the_end_of_a_window_is_not_taken_for_that_of_another_one(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the clocks have drifted apart in the window."""
    with slow_windows(tmp_path, nvml_library) as measuring:
        monkeypatch.setattr("pytest_llenergy.hosts.client.LATER_EXCHANGES", 1)
        (windows,) = measuring._hosts
        assert isinstance(windows, RemoteWindows)
        line = DriftingLine()
        windows._client.clock = line
        windows._client.exchange()
        # In the middle of a tick.
        time.sleep(0.6 - time.monotonic() % 0.5)
        with measuring.window("short") as window:
            time.sleep(0.2)
        assert "that other windows share" not in (window.reason or "")
