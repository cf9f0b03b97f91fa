# SPDX-License-Identifier: Apache-2.0
"""Faults that leave no energy, or only flagged energy: never a zero, always a reason."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy import Measuring, Window
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.rapl import open_rapl
from pytest_llenergy.energy.meters.select import MeterRegistry, Selection, open_meters
from pytest_llenergy.energy.window_meters import LocalWindows
from pytest_llenergy.errors import MeterError
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.record.record import Round

from ..energy.waves import MS
from ..nvml_sim import Board, MigInstance, World
from .marks import measure
from .plans import round_plan

pytestmark = pytest.mark.clock

Attach = Callable[[World], ModuleType]
MIG = "MIG-3f1d8a52-0000-5c7e-8a3f-111111111111"


@pytest.fixture
def world(tmp_path: Path, nvml_attach: Attach) -> World:
    made = World(tmp_path / "world", [Board(power_w=200.0, latch_ns=20 * MS)])
    nvml_attach(made)
    return made


def run(
    function: Callable[[], object], rounds: int = 1, gap_s: float = 0.1, targets: Targets | None = None
) -> Experiment:
    lease = select_devices(GpuRequest(1), environment={})
    selection = open_meters((), MeterRegistry(), targets or Targets(lease.uuids))
    plan = round_plan(rounds=rounds, warmup=0, gap_s=gap_s, budget_s=0.1)
    return measure(CallWorkload(function), plan, selection, lease)


def check(round_: Round, watts: float) -> None:
    """Compare with constant power; four standard uncertainties, so that chance never fails a test."""
    assert round_.energy_j is not None, round_.reason
    assert round_.energy_u_j is not None
    assert abs(round_.energy_j - watts * round_.duration_s) <= 4 * round_.energy_u_j
    assert round_.energy_u_j < 0.3 * round_.energy_j


def names(round_: Round) -> set[str]:
    return {flag.name for flag in round_.flags}


def test_a_board_lost_during_a_round_gives_a_reason(world: World) -> None:
    result = run(lambda: world.update(0, lost=True), rounds=2)
    reason = f"nvml: GPU is lost ({world.board(0).uuid})"
    assert [round_.energy_j for round_ in result.rounds] == [None, None]
    assert {round_.reason for round_ in result.rounds} == {reason}
    assert (result.metrics["energy_j"].value, result.metrics["energy_j"].reason) == (None, reason)
    assert {"unmeasured"} <= names(result.rounds[0])


def test_a_board_that_comes_back_affects_only_one_round(world: World) -> None:
    turns = iter(range(3))

    def work() -> None:
        if next(turns) == 1:
            world.update(0, lost=True)
            time.sleep(0.1)
            world.update(0, lost=False)
        time.sleep(0.1)

    first, second, third = run(work, rounds=3).rounds
    assert second.reason == f"nvml: GPU is lost ({world.board(0).uuid})"
    for round_ in (first, third):
        check(round_, 200)


def test_a_counter_frozen_before_the_run_is_replaced_by_integrated_power(world: World) -> None:
    world.update(0, frozen=True)
    (round_,) = run(lambda: time.sleep(0.3)).rounds
    check(round_, 200)
    (flag,) = (flag for flag in round_.flags if "rejected" in flag.detail)
    assert flag.name == "meter"
    assert re.fullmatch(
        rf"{world.board(0).uuid}: energy counter rejected: stood still for \d+\.\d s while the board drew "
        "200 W; NVML_FI_DEV_POWER_INSTANT is integrated instead",
        flag.detail,
    )


def test_a_counter_that_counts_half_is_replaced_by_integrated_power(world: World) -> None:
    world.update(0, energy_gain=0.57)
    (round_,) = run(lambda: time.sleep(0.3)).rounds
    check(round_, 200)
    (flag,) = (flag for flag in round_.flags if "rejected" in flag.detail)
    assert ", integrated power" in flag.detail
    assert "(-43 %)" in flag.detail


def test_a_counter_that_freezes_during_a_round_gives_a_reason(world: World) -> None:
    turns = iter(range(2))

    def work() -> None:
        if next(turns) == 0:
            world.update(0, frozen=True)
        time.sleep(0.05)

    for round_ in run(work, rounds=2).rounds:
        assert round_.energy_j is None
        assert round_.reason == (
            f"nvml: gpu:{world.board(0).uuid} ticked fewer than 2 times in a quiet gap; it stands still"
        )


@pytest.mark.parametrize(
    "reset",
    [lambda world: world.update(0, energy_offset_mj=0), lambda world: world.reset_counter(0)],
    ids=["backwards", "reset"],
)
def test_a_counter_that_runs_backwards_affects_only_one_round(
    world: World, reset: Callable[[World], None]
) -> None:
    turns = iter(range(2))

    def work() -> None:
        if next(turns) == 0:
            reset(world)
        time.sleep(0.1)

    first, second = run(work, rounds=2).rounds
    assert first.energy_j is None
    assert (first.reason or "").startswith(
        f"nvml: the counter of gpu:{world.board(0).uuid} went backwards, from "
    )
    assert (first.reason or "").endswith("; it was reset or is broken")
    check(second, 200)


def test_a_counter_that_jumps_by_50_j_affects_only_one_round(world: World) -> None:
    turns = iter(range(2))

    def work() -> None:
        time.sleep(0.1)
        if next(turns) == 0:
            world.update(0, energy_offset_mj=world.board(0).energy_offset_mj + 50_000)
        time.sleep(0.1)

    first, second = run(work, rounds=2).rounds
    assert first.energy_j is None
    assert (first.reason or "").startswith(f"nvml: the counter of gpu:{world.board(0).uuid} ")
    assert (first.reason or "").endswith("of a device that may draw 700 W")
    check(second, 200)


def test_a_mig_instance_is_measured_as_its_whole_board(tmp_path: Path, nvml_attach: Attach) -> None:
    board = Board(power_w=200.0, latch_ns=20 * MS, mig_enabled=True, mig_instances=(MigInstance(uuid=MIG),))
    world = World(tmp_path / "mig", [board])
    nvml_attach(world)
    (round_,) = run(lambda: time.sleep(0.2), targets=Targets((MIG,))).rounds
    assert list(round_.by_domain) == [f"gpu:{world.board(0).uuid}"]
    check(round_, 200)
    assert "meter" in names(round_)


def test_a_module_counter_is_flagged(tmp_path: Path, nvml_attach: Attach) -> None:
    """On a Grace Hopper the GPU alone has neither a counter nor a power reading."""
    world = World(tmp_path / "gh", [Board(power_w=200.0, latch_ns=20 * MS, scopes=(1,), module_factor=1.5)])
    nvml_attach(world)
    result = run(lambda: time.sleep(0.2))
    (round_,) = result.rounds
    check(round_, 300)
    assert result.meters[0].scope == "module"
    assert "meter" in names(round_)


def test_a_driver_that_is_missing_or_denies_permission_is_named(world: World, nvml_attach: Attach) -> None:
    uuid = world.board(0).uuid
    pynvml = nvml_attach(world)
    pynvml.nvmlShutdown()
    for code, message in (
        (4, "nvml: Insufficient Permissions; see nvidia-smi"),
        (9, "nvml: Driver Not Loaded; load the NVIDIA kernel module"),
    ):
        world.set_init_result(code)
        with pytest.raises(MeterError) as caught:
            open_meters(("nvml",), MeterRegistry(), Targets((uuid,)))
        assert str(caught.value) == f"no meter for GPUs {uuid}: {message}"


def test_unreadable_rapl_leaves_its_remedy_in_the_record(tmp_path: Path) -> None:
    unreadable = "rapl: no permission to read energy_uj; sudo tee"
    selection = Selection((), (unreadable,))
    result = measure(
        CallWorkload(lambda: time.sleep(0.01)),
        round_plan(rounds=1, warmup=0),
        selection,
        Lease(devices=("cpu",)),
    )
    assert [(flag.name, flag.severity, flag.detail) for flag in result.flags] == [
        ("meter", "note", unreadable)
    ]


@pytest.mark.clock
def test_a_rapl_counter_that_wraps_within_a_window_of_5_ms_is_followed(tmp_path: Path) -> None:
    """The counter advances at 10 W and wraps after 0.1 s, while windows of 5 ms follow one another."""
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    counter = zone / "energy_uj"
    stop = threading.Event()
    wrapped_at_ns: list[int] = []

    def drive() -> None:
        # Constant 10 W, starting 1 J below the wrap, updated as fast as the file can be written.
        begin_ns = time.monotonic_ns()
        while not stop.is_set():
            spent_uj = (time.monotonic_ns() - begin_ns) // 100
            value = 262143328850 - 1_000_000 + spent_uj
            if value >= 262143328850 and not wrapped_at_ns:
                wrapped_at_ns.append(time.monotonic_ns())
            with counter.open("r+") as file:
                file.write(f"{value % 262143328850:<20d}\n")

    counter.write_text(f"{262143328850 - 1_000_000:<20d}\n")
    thread = threading.Thread(target=drive)
    thread.start()
    try:
        meters = open_rapl(Targets(), powercap_root=tmp_path, still_s=60)
        with Measuring([LocalWindows(Selection(tuple(meters), ()))]) as energy:
            windows: list[Window] = []
            while not wrapped_at_ns or len(windows) < 30:
                with energy.window("5 ms") as window:
                    time.sleep(0.005)
                windows.append(window)
            time.sleep(0.1)
            # A window in which the counter was not read has no joules, but not all are so short.
            joules = [(window.record.energy_j, window.duration_s) for window in windows]
            assert any(each is not None for each, _ in joules), [window.reason for window in windows]
            # A wrap that is not followed would be 262 kJ; a window of a busy host may be long.
            assert all(each is None or 0 <= each < 1 + 20 * took_s for each, took_s in joules), joules
        (package,) = energy.total.record.by_domain.values()
        # On a busy host the package's joules are split.
        whole_j = package.energy_j if package.whole_j is None else package.whole_j
        assert whole_j == pytest.approx(10 * energy.total.duration_s, rel=0.1)
    finally:
        stop.set()
        thread.join()


def test_a_jump_of_the_wall_clock_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time

    def work() -> None:
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        time.sleep(0.2)
        monkeypatch.setattr(time, "time", lambda: real() - 86_400)

    (round_,) = run(work).rounds
    check(round_, 200)
    # The clock jumped by a day.
    assert 0.2 <= round_.duration_s < 600


def test_a_reader_blocked_for_300_ms_is_flagged_and_still_correct(world: World) -> None:
    world.set_power(0, 500.0)

    def work() -> None:
        # The driver does not answer for a while, so the reader hangs in its call.
        world.update(0, call_delay_ns=300 * MS)
        time.sleep(0.35)
        world.update(0, call_delay_ns=0)
        time.sleep(0.2)

    (round_,) = run(work, gap_s=0.3).rounds
    check(round_, 500)
    (flag,) = (flag for flag in round_.flags if flag.name == "doubtful")
    assert re.fullmatch(
        rf"gpu:{world.board(0).uuid} was not read for [23]\d\d ms although it was due", flag.detail
    )
