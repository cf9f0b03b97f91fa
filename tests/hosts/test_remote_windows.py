# SPDX-License-Identifier: Apache-2.0
"""Windows of ``energy_meter`` on several hosts, with real agents: what they ask, in which order and when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.energy.window import Measuring
from pytest_llenergy.hosts.clock import Exchange
from pytest_llenergy.hosts.peer import Pending
from pytest_llenergy.hosts.remote_meters import RemoteWindows, open_remote_meters

from ..energy.waves import MS
from .metered import MeteredHost, metered_hosts


class Sent:
    """The calls that are sent to hosts, by host and method, in their order."""

    def __init__(self, hosts: Sequence[MeteredHost], monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls: list[tuple[str, str]] = []
        for host in hosts:
            monkeypatch.setattr(host.client, "begin", self._watch(host))

    def _watch(self, host: MeteredHost) -> Any:
        begin = host.client.begin

        def watched(method: str, *args: Any, **kwargs: Any) -> Pending:
            self._calls.append((host.client.name, method.removeprefix("windows.")))
            return begin(method, *args, **kwargs)

        return watched

    def take(self) -> list[tuple[str, str]]:
        """Return the calls since the last time, equal neighbours once."""
        found, self._calls = self._calls, []
        return [each for each, previous in zip(found, [None, *found], strict=False) if each != previous]


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


def test_hosts_start_and_read_their_meters_at_the_same_time(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched_windows(tmp_path, nvml_library, monkeypatch) as (measuring, sent):
        measuring.start()
        assert sent.take() == on_both("start", "infos")
        measuring.begin("first")
        # No clock is compared between the first reading and the begin of the window.
        assert sent.take() == on_both("clock", "prepare", "begin")
        measuring.end("first")
        assert sent.take()[:2] == on_both("end_work")


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
