# SPDX-License-Identifier: Apache-2.0
"""Windows of ``energy_meter`` on several hosts, with real agents: what they ask, in which order and when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cluster.client import Pending
from pytest_llenergy.cluster.meter_client import MeterClient, open_remote_meters
from pytest_llenergy.cluster.remote_meters import RemoteMeters
from pytest_llenergy.cluster.remote_windows import RemoteWindows
from pytest_llenergy.measure.host_meters import HostMeters
from pytest_llenergy.meters.window import Measuring
from pytest_llenergy.meters.window_meters import WindowMeters

from .metered import MeteredHost, metered_hosts


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
        assert sent.take() == on_both("start", "infos")
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
            sum(each["energy_j"] for each in pending.result(0)["energies"].values()) for pending in early
        ]
        first, second, around = (sum(found[i : i + 2]) for i in (0, 2, 4))
        by_name = {window.name: window for window in measuring.windows}
        for name, early_j in (("first", first), ("second", second), ("around", around)):
            window = by_name[name]
            assert abs(window.energy_j - early_j) <= 4 * window.energy_u_j
