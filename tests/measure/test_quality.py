# SPDX-License-Identifier: Apache-2.0
"""Flags: what makes a round suspect, and what makes it invalid."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.devices.processes import BoardProcess
from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.meters.base import Domain
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Variances, WindowEnergy
from pytest_llenergy.measure import quality
from pytest_llenergy.measure.quality import (
    drift_flags,
    energy_flags,
    unfinished_flag,
    use_flags,
)
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Flag, Round, Terms
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import MS, domain
from .marks import account_here, iteration, measured_round

WORK = iteration(1_000 * MS, 2_000 * MS)
GOOD = WindowEnergy(100.0, Variances(edges=1.0))
BOARD = "GPU-a"


def ticking(period_ms: int = 10, meter_domain: Domain | None = None) -> Series:
    series = Series("nvml", meter_domain or domain())
    for moment in range(0, 3_000, period_ms):
        series.add(moment * MS, moment * MS, float(moment))
    return series


def flags(
    energy: WindowEnergy = GOOD, round_: MeasuredRound | None = None, series: Series | None = None
) -> list[str]:
    measured = round_ or measured_round(WORK)
    edges_ns = measured.timeline.start_ns, measured.timeline.end_ns
    found = [*energy_flags(energy), *trace_flags([series or ticking()], *edges_ns), *use_flags(measured)]
    return [f"{flag.severity}: {flag.name}: {flag.detail}" for flag in found]


def energy(energy_j: float, u_j: float) -> WindowEnergy:
    return WindowEnergy(energy_j, Variances(edges=u_j**2))


def test_a_clean_round_has_no_flag() -> None:
    assert flags(energy(100, 10), measured_round(WORK, other_cpu_s=0.25, stolen_cpu_s=0.25)) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (WindowEnergy(None, reason="gone"), "warning: unmeasured: gone"),
        (energy(-4, 1), "warning: doubtful: the counters give -4 J, which is impossible"),
        (
            energy(-2, 1),
            "warning: imprecise: standard uncertainty more than all of the energy",
        ),
        (
            energy(100, 11),
            "warning: imprecise: standard uncertainty 11% of the energy",
        ),
    ],
)
def test_energy_is_flagged_if_missing_impossible_or_imprecise(found: WindowEnergy, expected: str) -> None:
    assert flags(found) == [expected]


@pytest.mark.parametrize("dithered", [True, False])
def test_rounds_below_zero_count_in_the_mean_and_the_median(dithered: bool) -> None:
    """Without them only those that are too high would be left, and the mean be 41 J for 15 J."""
    read_j = [15 + 40 * math.cos(2 * math.pi * index / 28) for index in range(28)]
    terms = Terms(edges_j=0.0, outside_j=0.0, resolution_j=0.0, coverage_j=1.0 if dithered else 0.0)
    rounds = [
        Round(
            start_s=0.0,
            duration_s=0.05,
            energy_j=joules,
            energy_u_j=1.0,
            energy_u_absolute_j=1.0,
            idle_power_w=None,
            idle_power_u_w=None,
            by_domain={},
            terms=terms,
            phase=index / 28,
            flags=energy_flags(energy(joules, 1.0)),
        )
        for index, joules in enumerate(read_j)
    ]
    assert sum("doubtful" in {flag.name for flag in each.flags} for each in rounds) == 9
    metric = compute_metrics(rounds, None, coverage=0.25)["energy_j"]
    assert metric.value == pytest.approx(15)
    assert metric.n == 28


class TestTheReader:
    def test_few_ticks_are_flagged(self) -> None:
        assert flags(series=ticking(700)) == ["warning: imprecise: gpu:GPU-a ticked 0 times in 1000 ms"]

    def test_a_reader_gap_in_the_round_is_flagged(self) -> None:
        series = ticking()
        series.late.append((1_500 * MS, 1_650 * MS))
        assert flags(series=series) == [
            "warning: doubtful: gpu:GPU-a was not read for 150 ms although it was due"
        ]

    @pytest.mark.parametrize("pause", [(1_500, 1_590), (2_100, 2_400)], ids=["short", "elsewhere"])
    def test_a_reader_gap_that_is_short_or_elsewhere_is_not_flagged(self, pause: tuple[int, int]) -> None:
        series = ticking()
        series.late.append((pause[0] * MS, pause[1] * MS))
        assert flags(series=series) == []

    def test_flags_of_the_meter_domain_are_added_to_the_round(self) -> None:
        rejected = Flag(name="meter", severity="warning", detail="stood still")
        plain = domain()
        flagged = plain._replace(flags=(rejected,))
        assert flags(series=ticking(meter_domain=flagged)) == ["warning: meter: stood still"]


class TestTheHost:
    def test_cpu_use_of_other_processes_is_flagged(self) -> None:
        assert flags(round_=measured_round(WORK, other_cpu_s=0.3)) == [
            "warning: contended: other processes used 0.30 cores"
        ]

    def test_cpu_time_stolen_by_the_hypervisor_is_flagged(self) -> None:
        assert flags(round_=measured_round(WORK, stolen_cpu_s=0.5)) == [
            "warning: contended: the hypervisor gave other guests 0.50 cores"
        ]


class TestTheBoard:
    @staticmethod
    def on(before: Condition, after: Condition) -> list[str]:
        return flags(round_=measured_round(WORK, before={BOARD: before}, after={BOARD: after}))

    def test_throttling_for_more_than_a_hundredth_of_the_round_is_flagged(self) -> None:
        before = Condition(throttled_s={"power-cap": 5.0, "thermal-hardware": 1.0}, processes=())
        after = Condition(throttled_s={"power-cap": 5.4, "thermal-hardware": 1.0}, processes=())
        assert self.on(before, after)[0] == (
            "warning: throttled: GPU-a: held back by power-cap 40% of the round"
        )

    def test_throttling_for_less_is_not_flagged(self) -> None:
        before = Condition(throttled_s={"power-cap": 5.0}, processes=())
        after = Condition(throttled_s={"power-cap": 5.009}, processes=())
        assert not any("throttled" in flag for flag in self.on(before, after))

    def test_another_process_makes_the_round_invalid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trust_every_pid(monkeypatch)
        other = Condition(processes=(BoardProcess(1, "init", 5),))
        assert self.on(Condition(processes=()), other) == [
            "invalid: gpu-processes: GPU-a is used by another process: 1 (init)"
        ]

    def test_another_process_that_came_and_went_is_flagged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trust_every_pid(monkeypatch)
        alone, other = Condition(processes=()), Condition(processes=(BoardProcess(1, "init", 5),))
        found = flags(
            round_=measured_round(WORK, before={BOARD: alone}, during=[{BOARD: other}], after={BOARD: alone})
        )
        assert [flag.split(": ")[1] for flag in found] == ["gpu-processes"]

    def test_the_process_of_the_test_itself_is_not_flagged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trust_every_pid(monkeypatch)
        own = Condition(processes=(BoardProcess(os.getpid(), "pytest", 5),))
        assert self.on(own, own) == []

    @pytest.mark.parametrize(
        ("listed", "pid", "names"),
        [
            (1, 1, []),
            (1, 2, ["gpu-processes", "gpu-processes"]),
            (os.getpid(), 2, ["gpu-processes"]),
            (2**31 - 1, 2, ["gpu-processes"]),
        ],
        ids=["server", "other", "pytest", "ended"],
    )
    def test_a_server_is_not_foreign_but_must_be_on_the_board(
        self, monkeypatch: pytest.MonkeyPatch, listed: int, pid: int, names: list[str]
    ) -> None:
        """A process that has ended may have been the server's."""
        trust_every_pid(monkeypatch)
        monkeypatch.setattr("pytest_llenergy.measure.quality.process_tree", lambda *roots: set(roots))
        observed = {BOARD: Condition(processes=(BoardProcess(listed, "init", 5),))}
        plain = measured_round(WORK, before=observed, after=observed)
        rank = msgspec.structs.replace(plain.timeline.ranks[0], servers=(pid,))
        round_ = replace(plain, timeline=Timeline(ranks=(rank,)))
        assert [flag.name for flag in account_here(round_, [ticking()]).flags] == names

    def test_unlisted_processes_are_flagged_as_unknown(self) -> None:
        assert self.on(Condition(), Condition()) == [
            "warning: gpu-processes: GPU-a: other processes are unknown: the driver does not report the "
            "processes on the board"
        ]


def trust_every_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run on the host: in a container the PIDs of NVML are meaningless."""
    own = Path("/proc/self/ns/pid").readlink().name
    inode = int(own.removeprefix("pid:[").removesuffix("]"))
    monkeypatch.setattr("pytest_llenergy.devices.processes.FIRST_PID_NAMESPACE", inode)


def test_a_steady_rise_is_flagged_as_drift_and_scatter_is_not() -> None:
    base = account_here(measured_round(WORK), [ticking()])
    energies: dict[str, list[float]] = {
        "rising": [100, 101, 102.1, 103, 104.2],
        "scattered": [100, 104, 99, 103, 101],
    }
    found = {
        name: drift_flags([msgspec.structs.replace(base, energy_j=value) for value in values])
        for name, values in energies.items()
    }
    assert found["scattered"] == []
    assert [flag.name for flag in found["rising"]] == ["uneven-rounds"]
    assert found["rising"][0].detail.startswith("energy changed by +4.1% over 5 rounds (t = ")
    assert quality.DRIFT < 0.041


def test_a_long_error_is_cut_even_without_spaces() -> None:
    flag = unfinished_flag(ValueError("x" * 1000 + "end\nsecond line"))
    assert flag.detail.startswith("the work failed: ValueError: xxx")
    assert flag.detail.endswith("xxend")
    assert len(flag.detail) < 400
