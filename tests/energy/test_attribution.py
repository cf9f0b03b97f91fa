# SPDX-License-Identifier: Apache-2.0
"""Joules of a CPU package split by CPU time, where the truth is idle power plus watts for each busy core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy import attribution
from pytest_llenergy.energy.attribution import MEMORY_RATIO, PACKAGE_RATIO, CpuUse, choose_split
from pytest_llenergy.energy.cpu_time import CpuTime, read_cpu_time
from pytest_llenergy.energy.host_window import account_window, window_record
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.rapl import RaplMeter, Zone, open_rapl
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Attributed, Power, WindowEnergy
from pytest_llenergy.energy.window import Measuring
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.foreign_rounds import Stretch, account_stretches
from pytest_llenergy.measure.host_meters import TickReference
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload, PhaseDither, run_round
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.workload import call_workload
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import MeterInfo, Record, Round, WindowRecord

from ..measure.marks import account_here, iteration, measure, measured_round
from ..ranks.groups import PLAIN, start
from .test_cpu_time import neighbours
from .test_rapl import Machine
from .waves import MS, S, Wave, domain

IDLE_W, CORE_W = 20.0, 8.0
START, END, BORDER = 10 * S, 12 * S, 10 * S + 500 * MS
PACKAGE = domain("cpu:package-0", max_age_s=1e-9)._replace(cpu_ratio=PACKAGE_RATIO)


def record_window(series: Series, used: CpuUse) -> WindowRecord:
    """Return the record of a window from ``START`` to ``END``."""
    return window_record("work", START, END, [account_window([series], START, END, [], use=used)])


def use(own: float, others: float, seconds: float = 2.0) -> CpuUse:
    """Return the use of so many cores."""
    return CpuUse(own * seconds, others * seconds, 0.0, seconds)


def package(own: float, before: float, during: float, after: float, other_w: float = CORE_W) -> Series:
    """Return the counter of a package whose gaps and work have so many cores of others."""
    watts = [IDLE_W + other_w * before, IDLE_W + CORE_W * own + other_w * during, IDLE_W + other_w * after]
    wave = Wave(tuple(zip((9 * S, START, END), watts, strict=True)))
    series = Series("rapl", PACKAGE)
    for moment in range(9 * S, 13 * S, MS):
        series.add(moment, moment, wave.energy_j(moment))
    return series


def account(
    own: float,
    before: float,
    during: float,
    after: float,
    rest: dict[str, Power] | None = None,
    other_w: float = CORE_W,
) -> Round:
    """Return a round of two seconds beside so many cores of others."""
    series = package(own, before, during, after, other_w)
    marks = measured_round(
        iteration(START, END, BORDER),
        other_cpu_s=2 * during,
        own_cpu_s=2 * own,
        gap_cpu=(use(0, before, 0.25), use(0, after, 0.25)),
    )
    return account_here(marks, [series], rest=rest)


def split_part(use_: CpuUse, whole_j: float, idle: Power | None, ratio: float = PACKAGE_RATIO) -> Attributed:
    rest = {} if idle is None else {PACKAGE.name: idle}
    split = choose_split(PACKAGE._replace(cpu_ratio=ratio), use_, rest=rest)
    part = split.part(WindowEnergy(whole_j), use_.duration_s) if split is not None else None
    assert part is not None
    return part


class TestRounds:
    def test_beside_others_the_joules_are_idle_plus_those_of_the_test(self) -> None:
        round_ = account(own=1, before=0, during=3, after=0)
        part = round_.by_domain["cpu:package-0"]
        assert round_.energy_j == pytest.approx(2 * (IDLE_W + CORE_W), rel=1e-3)
        assert part.kind == "attributed"
        assert part.whole_j == pytest.approx(2 * (IDLE_W + 4 * CORE_W), rel=1e-3)
        assert round_.idle_power_w == pytest.approx(IDLE_W, rel=1e-3)
        assert compute_metrics([round_], None)["net_energy_j"].value == pytest.approx(2 * CORE_W, rel=1e-2)
        assert (round_.own_cpu_s, round_.other_cpu_s) == (2, 6)
        # The share of 25 % may be 18 to 33 % of the 64 J above idle, of the net energy and of all of it.
        metrics = compute_metrics([round_] * 3, None)
        net_u_j, u_j = (metrics[name].uncertainty_absolute for name in ("net_energy_j", "energy_j"))
        assert net_u_j == pytest.approx(u_j, rel=0.01)
        assert net_u_j is not None
        assert net_u_j > (64 / 3 - 64 / 5.5) / 12**0.5
        assert [(flag.name, flag.severity) for flag in round_.flags] == [
            ("contended", "warning"),
            ("attributed", "note"),
        ]
        assert round_.flags[1].detail == (
            "others used 6 of 8 CPU s: joules above idle (20 W) are split by CPU time"
        )

    def test_phases_are_split_alike_and_still_add_up(self) -> None:
        round_ = account(own=1, before=0, during=3, after=0)
        joules = [phase.energy_j for phase in round_.phases]
        assert joules == pytest.approx([0.5 * (IDLE_W + CORE_W), 1.5 * (IDLE_W + CORE_W)], rel=1e-2)
        assert sum(each or 0.0 for each in joules) == pytest.approx(round_.energy_j, rel=1e-6)

    def test_on_a_quiet_host_the_joules_are_all_those_of_the_package(self) -> None:
        round_ = account(own=1, before=0, during=0.2, after=0)
        part = round_.by_domain["cpu:package-0"]
        assert (part.kind, part.whole_j) == ("measured", None)
        assert round_.energy_j == pytest.approx(2 * (IDLE_W + 1.2 * CORE_W), rel=1e-3)
        assert round_.flags == []

    @pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0)])
    def test_one_quiet_gap_gives_the_idle_power(self, before: float, after: float) -> None:
        round_ = account(own=1, before=before, during=3, after=after)
        assert round_.energy_j == pytest.approx(2 * (IDLE_W + CORE_W), rel=1e-3)

    @pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0)])
    def test_use_by_others_in_a_gap_alone_is_not_idle_power(self, before: float, after: float) -> None:
        round_ = account(own=1, before=before, during=0, after=after)
        assert round_.by_domain["cpu:package-0"].kind == "measured"
        assert round_.idle_power_w == pytest.approx(IDLE_W, rel=1e-3)

    def test_use_by_others_in_both_gaps_alone_leaves_idle_power_unknown(self) -> None:
        round_ = account(own=1, before=3, during=0, after=3)
        assert round_.energy_j == pytest.approx(2 * (IDLE_W + CORE_W), rel=1e-3)
        assert round_.idle_power_w is None

    def test_an_earlier_quiet_gap_gives_the_idle_power(self) -> None:
        rest: dict[str, Power] = {}
        account(own=1, before=0, during=0, after=0, rest=rest)
        round_ = account(own=1, before=3, during=3, after=3, rest=rest)
        assert round_.energy_j == pytest.approx(2 * (IDLE_W + CORE_W), rel=1e-3)

    def test_beside_others_that_use_every_core_idle_power_is_unknown_and_all_joules_are_split(self) -> None:
        round_ = account(own=1, before=4, during=3, after=4)
        part = round_.by_domain["cpu:package-0"]
        whole_j, true_j = 2 * (IDLE_W + 4 * CORE_W), 2 * (IDLE_W + CORE_W)
        assert round_.energy_j == pytest.approx(whole_j / 4, rel=1e-3)
        assert part.low_j is not None
        assert part.high_j is not None
        assert part.low_j < true_j < part.high_j
        assert round_.idle_power_w is None
        assert "all of them since idle power is unknown" in round_.flags[-1].detail

    @pytest.mark.parametrize("other_w", [CORE_W / PACKAGE_RATIO, CORE_W * PACKAGE_RATIO])
    @pytest.mark.parametrize("before", [0, 2])
    def test_the_limits_hold_if_the_cores_of_others_draw_half_as_much_again_or_less(
        self, other_w: float, before: float
    ) -> None:
        round_ = account(own=1, before=before, during=2, after=before, other_w=other_w)
        part = round_.by_domain["cpu:package-0"]
        assert part.low_j is not None
        assert part.high_j is not None
        assert part.low_j <= 2 * (IDLE_W + CORE_W) <= part.high_j
        assert round_.energy_u_absolute_j is not None
        assert round_.energy_u_j is not None
        assert round_.energy_u_absolute_j > round_.energy_u_j

    def test_a_record_is_attributed_if_half_of_its_rounds_are(self) -> None:
        busy, quiet = account(1, 0, 3, 0), account(1, 0, 0, 0)
        window = record_window(package(1, 1, 1, 1), use(1, 1))
        meter = MeterInfo(
            name="rapl",
            domain="cpu:package-0",
            kind="measured",
            source="",
            scope="package",
            update_period_s=None,
            resolution_j=None,
            accuracy="",
        )
        kinds = [
            Record(id="a", attempt=1, status="measured", meters=[meter], rounds=rounds).kind
            for rounds in ([busy, quiet], [busy, quiet, quiet])
        ]
        assert kinds == ["attributed", "measured"]
        windows = Record(id="a", attempt=1, status="measured", meters=[meter], windows=[window])
        assert windows.kind == "attributed"


class TestTheSplit:
    def test_of_memory_only_the_idle_joules_are_certain(self) -> None:
        part = split_part(use(1, 1), 100.0, Power(IDLE_W, 0.0), MEMORY_RATIO)
        assert (part.low_j, part.high_j) == pytest.approx((40, 100))

    def test_the_ticks_of_cpu_time_and_the_idle_power_are_in_the_uncertainty(self) -> None:
        part = split_part(use(1, 1), 100.0, Power(IDLE_W, 3.0))
        terms = part.energy.variances.terms()
        assert terms.attribution_j == pytest.approx((3.0**2 + (0.5 * 0.01 / 4 * 60) ** 2) ** 0.5)


def test_rounds_of_another_tool_are_split_by_the_cpu_time_of_all_of_them() -> None:
    marks = measured_round(
        iteration(START, END), other_cpu_s=6, own_cpu_s=2, gap_cpu=(use(0, 0, 0.25), use(0, 0, 0.25))
    )
    half = Stretch(START, START + S, rounds=1, iterations=1, timed_s=1.0)
    (round_,) = account_stretches([half], marks, [package(own=1, before=0, during=3, after=0)])
    part = round_.by_domain["cpu:package-0"]
    assert round_.energy_j == pytest.approx(IDLE_W + CORE_W, rel=1e-2)
    assert part.kind == "attributed"
    assert part.whole_j == pytest.approx(IDLE_W + 4 * CORE_W, rel=1e-2)
    assert round_.idle_power_w == pytest.approx(IDLE_W, rel=1e-2)
    assert round_.own_cpu_s == pytest.approx(1)
    assert round_.flags[-1].name == "attributed"


@pytest.mark.parametrize("others", [0, 3, 7])
def test_the_joules_between_rounds_of_another_tool_do_not_include_those_of_others(others: float) -> None:
    marks = measured_round(
        iteration(START, END), other_cpu_s=2 * others, own_cpu_s=2, gap_cpu=(use(0, 0, 0.25), use(0, 0, 0.25))
    )
    stretch = Stretch(START, START + S, rounds=1, iterations=1, timed_s=0.75)
    (round_,) = account_stretches([stretch], marks, [package(own=1, before=0, during=others, after=0)])
    own_j = IDLE_W + CORE_W
    assert round_.energy_j == pytest.approx(0.75 * own_j, rel=1e-2)
    # A quarter of the time is between rounds, with nothing to twice the joules of this process.
    assert round_.energy_u_absolute_j is not None
    assert 0.25 * own_j / 3**0.5 <= round_.energy_u_absolute_j <= 0.2 * own_j


@pytest.mark.parametrize(("after", "idle_w"), [(0, IDLE_W), (3, None)])
def test_use_by_others_before_rounds_of_another_tool_is_not_idle_power(
    after: float, idle_w: float | None
) -> None:
    gaps = use(0, 3, 0.25), use(0, after, 0.25)
    marks = measured_round(iteration(START, END), own_cpu_s=2, gap_cpu=gaps)
    stretch = Stretch(START, START + S, rounds=1, iterations=1, timed_s=1.0)
    (round_,) = account_stretches([stretch], marks, [package(own=1, before=3, during=0, after=after)])
    assert round_.energy_j == pytest.approx(IDLE_W + CORE_W, rel=1e-2)
    assert round_.idle_power_w == (None if idle_w is None else pytest.approx(idle_w, rel=1e-2))


@pytest.mark.clock
def test_use_by_others_while_a_round_waits_for_its_phase_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Waiting(PhaseDither):
        def wait(self, reference: TickReference | None) -> None:
            time.sleep(0.2)

    monkeypatch.setattr(
        attribution, "read_cpu_time", lambda: CpuTime(time.process_time() + 3 * time.monotonic(), 0.0)
    )
    with LocalMeters(open_package()) as host:
        round_ = run_round(CallWorkload(lambda: time.sleep(0.2)), 1, 0.1, Waiting(1), [host])
        found = host.account(round_)()
    assert found.cpu.other_s == pytest.approx(3 * round_.timeline.duration_s, rel=0.2)


def test_a_window_beside_others_is_split_with_idle_power_unknown() -> None:
    series, used = package(own=1, before=1, during=1, after=1), use(1, 1)
    window = record_window(series, used)
    part = window.by_domain["cpu:package-0"]
    assert window.energy_j == pytest.approx(IDLE_W + 2 * CORE_W, rel=1e-2)
    assert part.whole_j == pytest.approx(2 * (IDLE_W + 2 * CORE_W), rel=1e-2)
    assert part.low_j is not None
    assert part.high_j is not None
    assert part.low_j < 2 * (IDLE_W + CORE_W) < part.high_j
    assert (window.own_cpu_s, window.other_cpu_s) == (2, 2)
    assert [flag.name for flag in window.flags] == ["attributed"]


HOST, LXCFS, GVISOR = "cpu 1 2 3 4", None, "cpu 0 0 0 0"


@pytest.mark.parametrize(
    ("targets", "stat", "why"),
    [
        (Targets(), HOST, ""),
        (Targets(unknown_processes="a container"), HOST, "a container"),
        (Targets(), LXCFS, "proc/stat is not the host's"),
        (Targets(), GVISOR, "proc/stat shows no CPU time, as in gVisor"),
    ],
)
def test_packages_are_split_or_a_flag_says_why_not(
    tmp_path: Path, targets: Targets, stat: str | None, why: str
) -> None:
    machine = Machine(tmp_path, {"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram"})
    (tmp_path / "proc").mkdir()
    if stat is None:
        (tmp_path / "proc" / "stat").symlink_to("/proc/stat")
    else:
        (tmp_path / "proc" / "stat").write_text(f"{stat}\ncpu0 0 0 0 0\n")
    (meter,) = open_rapl(targets, powercap_root=tmp_path, proc=tmp_path / "proc", pause=machine.pause)
    meter.close()
    assert [each.cpu_ratio for each in meter.domains] == (
        [None, None] if why else [PACKAGE_RATIO, MEMORY_RATIO]
    )
    details = [flag.detail for each in meter.domains for flag in each.flags]
    assert len(details) == bool(why)
    for detail in details:
        assert detail.startswith("all energy of the processors is counted, whoever used them: ")
        assert why in detail


class Package(Zone):
    """A counter that is always up to date: idle power, and watts for each busy core of this host."""

    def __init__(self) -> None:
        self.domain = "cpu:package-0"
        self._begin_s, self._begin_busy_s = time.monotonic(), read_cpu_time().busy_s

    def read(self, still_s: float) -> float | str:
        idle_j = IDLE_W * (time.monotonic() - self._begin_s)
        return idle_j + CORE_W * (read_cpu_time().busy_s - self._begin_busy_s)

    def close(self) -> None:
        """Nothing is held open."""


def open_package() -> Selection:
    return Selection((RaplMeter([Package()], (), 60),), ())


LOOP_S = 0.4


def spin() -> None:
    end_s = time.thread_time() + LOOP_S
    while time.thread_time() < end_s:
        pass


def spin_in_rank(loop_s: float) -> None:
    import time

    end_s = time.thread_time() + loop_s
    while time.thread_time() < end_s:
        pass


def measure_in_process(selection: Selection, plan: RoundPlan) -> Experiment:
    return measure(CallWorkload(spin), plan, selection, Lease(("cpu",)))


def measure_on_rank(selection: Selection, plan: RoundPlan) -> Experiment:
    host = LocalHost("spawn")
    group = start(host, 1, PLAIN)
    try:
        workload = call_workload(group, spin_in_rank, (LOOP_S,), {}, 120.0)
        return measure(workload, plan, selection, Lease(("cpu",)))
    finally:
        group.close()
        host.close()


@pytest.mark.clock
@pytest.mark.parametrize("run", [measure_in_process, pytest.param(measure_on_rank, marks=pytest.mark.slow)])
def test_the_limits_of_real_work_beside_real_neighbours_contain_its_joules(
    run: Callable[[Selection, RoundPlan], Experiment],
) -> None:
    plan = RoundPlan(rounds=2, warmup=0, gap_s=0.25, target=0.02, budget_s=0.0)
    with neighbours(2):
        experiment = run(open_package(), plan)
    for round_ in experiment.rounds:
        part = round_.by_domain["cpu:package-0"]
        assert part.reason is None
        assert part.kind == "attributed", (part, round_.flags)
        # The reader of the meters works in this process too.
        assert round_.own_cpu_s == pytest.approx(LOOP_S, rel=0.15)
        assert part.low_j is not None
        assert part.high_j is not None
        assert part.low_j <= IDLE_W * round_.duration_s + CORE_W * LOOP_S <= part.high_j


@pytest.mark.clock
def test_a_real_window_beside_real_neighbours_is_attributed() -> None:
    with neighbours(2), Measuring([LocalWindows(open_package())]) as energy, energy.window("spin") as window:
        spin()
    part = window.by_domain["cpu:package-0"]
    assert part.kind == "attributed"
    assert window.record.own_cpu_s == pytest.approx(LOOP_S, rel=0.15)
    assert part.low_j is not None
    assert part.high_j is not None
    assert part.low_j <= IDLE_W * window.duration_s + CORE_W * LOOP_S <= part.high_j
