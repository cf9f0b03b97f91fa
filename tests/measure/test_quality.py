# SPDX-License-Identifier: Apache-2.0
"""Flags: what makes a round suspect, and what makes it no result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llenergy.measure.quality import round_flags
from pytest_llenergy.measure.windows import Energy
from pytest_llenergy.meters.trace import Series

from .waves import MS, domain, measured

ROUND = measured(1_000 * MS, 2_000 * MS)


def ticking(period_ms: int) -> Series:
    series = Series("nvml", domain(period_s=0.0))
    for moment in range(0, 3_000, period_ms):
        series.add(moment * MS, float(moment))
    return series


def flags(energy: Energy, *, other_s: float = 0.0, stolen_s: float = 0.0, period_ms: int = 10) -> list[str]:
    round_ = replace(ROUND, other_cpu_s=other_s, stolen_cpu_s=stolen_s)
    found = round_flags(round_, [ticking(period_ms)], energy, 1.0)
    return [f"{flag.severity}: {flag.name}: {flag.detail}" for flag in found]


def test_a_clean_round_has_no_flag() -> None:
    assert flags(Energy(100.0, 10.0), other_s=0.25, stolen_s=0.25) == []


@pytest.mark.parametrize(
    ("energy", "condition", "expected"),
    [
        (Energy(None, None, "gone"), {}, "warning: unmeasured: gone"),
        (Energy(0.0, 1.0), {}, "invalid: impossible: the counters give 0 J, which no work can use"),
        (Energy(-2.0, 1.0), {}, "invalid: impossible: the counters give -2 J, which no work can use"),
        (
            Energy(100.0, 11.0),
            {},
            "warning: imprecise: standard uncertainty 11% of the energy; measure longer rounds",
        ),
        (Energy(100.0, 1.0), {"period_ms": 700}, "warning: few-ticks: gpu:GPU-a ticked 1 times in 1000 ms"),
        (Energy(100.0, 1.0), {"other_s": 0.3}, "warning: contended: other processes used 0.30 cores"),
        (
            Energy(100.0, 1.0),
            {"stolen_s": 0.5},
            "warning: stolen: the hypervisor gave other guests 0.50 cores",
        ),
    ],
)
def test_each_flag(energy: Energy, condition: dict[str, int], expected: str) -> None:
    assert flags(energy, **condition) == [expected]
