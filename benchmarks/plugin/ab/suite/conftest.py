# SPDX-License-Identifier: Apache-2.0
"""Option in which the sides of ``ab_run.py`` differ, and a meter that counts only this session's work."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import psutil
import pytest

from pytest_llenergy.energy.meters.base import Domain, MeterSpec
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Record

#: Watts that a busy core adds to an idle one: Cloud Carbon Footprint, averages of AWS.
BUSY_W = 3.5 - 0.74

#: Keeps the counter moving while idle (watts); a thousandth of the work.
IDLE_W = 0.002

#: Linux reports CPU time in ticks of 10 ms.
TICK_S = 0.01

#: Interval at which new ranks are discovered (seconds).
DISCOVERY_S = 1.0

#: Joules per output token of the made-up meter.
TOKEN_J = 0.1


class SessionCpu:
    """CPU seconds of this session's ranks times watts: an estimate of the joules of their work alone.

    Unlike the meter ``estimate``, this leaves out pytest's own process: while ranks work it only reads this
    meter.
    """

    name = "session-cpu"
    poll_period_s = 0.05

    def __init__(self) -> None:
        self._spent_s: dict[tuple[int, float], float] = {}
        self._ranks: list[psutil.Process] = []
        self._looked_s = 0.0
        self.domains = (
            Domain(
                name="cpu:session",
                kind="estimated",
                source=f"CPU time of the ranks x {BUSY_W:.2f} W",
                scope="processes below pytest",
                resolution_j=BUSY_W * TICK_S,
                accuracy="a factor of 3",
                limits=lambda energy_j, _: (energy_j / 3, energy_j * 3),
                update_period_s=TICK_S,
                max_age_s=TICK_S,
            ),
        )

    def read(self) -> list[float | str]:
        """Read the CPU seconds; ranks that have ended count with their last known value."""
        if time.monotonic() - self._looked_s > DISCOVERY_S:
            # Listing processes takes milliseconds.
            self._ranks = psutil.Process().children(recursive=True)
            self._looked_s = time.monotonic()
        for process in self._ranks:
            try:
                times = process.cpu_times()
                self._spent_s[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        return [IDLE_W * time.monotonic() + BUSY_W * sum(self._spent_s.values())]

    def close(self) -> None:
        """Do nothing: the meter holds no resources."""


def pytest_llenergy_meters() -> Sequence[MeterSpec]:
    return [MeterSpec("session-cpu", "estimated", lambda _: [SessionCpu()])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--new-tokens", type=int, default=20, help="tokens to generate (default: 20)")
    parser.addoption(
        "--stand-in", action="store_true", help="use made-up joules: exactly 0.1 J per output token"
    )


def pytest_llenergy_record(item: pytest.Item, record: Record) -> Record | None:
    """With ``--stand-in``, replace the joules of the real work by a value per output token."""
    if not item.config.getoption("--stand-in"):
        return None
    rounds = [
        msgspec.structs.replace(
            each, energy_j=TOKEN_J * each.tokens.output, energy_u_j=0.001, energy_u_absolute_j=0.001
        )
        for each in record.rounds
        if each.tokens is not None
    ]
    meters = [
        msgspec.structs.replace(each, name="stand-in", source=f"{TOKEN_J} J per output token")
        for each in record.meters
    ]
    return msgspec.structs.replace(
        record, rounds=rounds, meters=meters, metrics=compute_metrics(rounds, None)
    )


@pytest.fixture
def new_tokens(request: pytest.FixtureRequest) -> int:
    """Number of output tokens: not a test parameter, so that the test has one name on both sides."""
    return int(request.config.getoption("--new-tokens"))
