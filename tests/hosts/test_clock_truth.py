# SPDX-License-Identifier: Apache-2.0
"""The clock of an agent in a time namespace, whose true offset is known to the nanosecond."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pytest_llenergy.hosts.remote_host import FIRST_EXCHANGES, RemoteHost

from .agents import SHIFT_S, gang, needs_another_host

TRUTH_NS = SHIFT_S * 10**9


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep every core busy, and one more."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for each in loops:
        each.kill()
        each.wait()


@needs_another_host
@pytest.mark.usefixtures("busy")
def test_the_true_offset_is_always_within_the_bound() -> None:
    with gang("n2") as [client]:
        begin_ns = time.monotonic_ns()
        offsets = [client.exchange() for _ in range(150)]
        end_ns = time.monotonic_ns()
        errors = [abs(each.offset_ns - TRUTH_NS) for each in offsets]
        within = sum(error <= each.bound_ns for error, each in zip(errors, offsets, strict=True))
        bounds = [each.bound_ns for each in offsets]
        print(
            f"bound {statistics.median(bounds) / 1e3:.1f} µs (largest {max(bounds) / 1e3:.0f}), "
            f"error {statistics.median(errors) / 1e3:.2f} µs (largest {max(errors) / 1e3:.1f})"
        )
        assert within == len(offsets)
        assert client.clock.fault(begin_ns, end_ns) is None
        for step in range(1000):
            between = client.clock.offset(begin_ns + (end_ns - begin_ns) * step // 1000)
            assert abs(between.offset_ns - TRUTH_NS) <= between.bound_ns
        # A bound that holds for an offset that is wrong by 10 ms would be no bound.
        wrong_ns = TRUTH_NS + 10_000_000
        assert sum(abs(each.offset_ns - wrong_ns) > each.bound_ns for each in offsets) > 0.9 * len(offsets)


@needs_another_host
def test_an_agent_in_another_time_namespace_is_a_clock_that_contradicts() -> None:
    """As when a virtual machine was moved: the same line, continued on another clock."""
    with gang("n2") as [before], gang(None) as [after]:
        line = before.clock
        after.clock = line
        begin_ns = time.monotonic_ns()
        after.exchange()
        reason = line.fault(begin_ns, time.monotonic_ns())
    assert reason is not None
    assert f"has a clock that moved by {-SHIFT_S * 1e3:.3g} ms against pytest's" in reason


def test_a_gang_starts_with_many_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    exchange = RemoteHost.exchange

    def count(client: RemoteHost, number: int = 0) -> object:
        counts.append(number)
        return exchange(client, number)

    monkeypatch.setattr(RemoteHost, "exchange", count)
    with gang(None):
        assert counts == [FIRST_EXCHANGES]
