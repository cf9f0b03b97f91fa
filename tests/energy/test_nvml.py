# SPDX-License-Identifier: Apache-2.0
"""Energy of NVIDIA boards by UUID, from the best source that a board offers, and every way to have none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.energy.meters.base import Domain, Targets
from pytest_llenergy.energy.meters.nvml import (
    NvmlMeter,
    counter_coverage,
    find_sources,
    open_nvml,
    sensor_coverage,
)
from pytest_llenergy.energy.selfcheck import CheckResult
from pytest_llenergy.errors import MeterDoesNotApply, MeterError

from ..nvml_sim import Board, MigInstance, World
from ..nvml_sim.world import NO_PERMISSION

Attach = Callable[[World], ModuleType]
MS = 1_000_000
DRIVER_NOT_LOADED = 9
COUNTER = "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
FIT = CheckResult(duration_s=1.0, ticks=10, period_s=0.1, mean_w=60.0)
STILL = CheckResult(duration_s=1.0, mean_w=60.0, reason="stood still for 1.0 s while the board drew 60 W")

OPEN = """
import ctypes
from pytest_llenergy.errors import MeterError
from pytest_llenergy.energy.meters.nvml import open_nvml
from pytest_llenergy.energy.meters.base import Targets
try:
    ctypes.CDLL("libnvidia-ml.so.1")
    print("library", end=": ")
except OSError:
    pass
try:
    open_nvml(Targets(("GPU-a",)))
except MeterError as error:
    print(error)
"""


@pytest.fixture
def attach_boards(tmp_path: Path, nvml_attach: Attach) -> Callable[..., World]:
    """Return a function that creates a world of the given boards and attaches this process to it."""

    def build(*boards: Board, **world: str) -> World:
        made = World(tmp_path / "world", boards, **world)  # type: ignore[arg-type]
        nvml_attach(made)
        return made

    return build


@contextmanager
def open_one_meter(world: World, result: CheckResult = FIT) -> Iterator[NvmlMeter]:
    """Open the meter of the first board after a self-check with this result."""
    session = Session()
    try:
        yield NvmlMeter(session, find_sources(session, session.open_board(world.board(0).uuid)), result)
    finally:
        session.close()


def only_domain(world: World, result: CheckResult = FIT) -> Domain:
    with open_one_meter(world, result) as meter:
        (domain,) = meter.domains
        return domain


def joules(meter: NvmlMeter) -> float:
    (value,) = meter.read()
    assert isinstance(value, float), value
    return value


def test_meters_by_uuid_read_their_own_board(tmp_path: Path, attach_boards: Callable[..., World]) -> None:
    slow = Board(name="Slow TITAN RTX", power_w=50.0, latch_ns=100 * MS, power_limit_w=72.0)
    world = attach_boards(
        slow, Board(name="Fast TITAN RTX", power_w=600.0, latch_ns=50 * MS, power_limit_w=700.0)
    )
    uuids = (world.board(1).uuid, world.board(0).uuid)
    meters = open_nvml(Targets(uuids), tmp_path / "cache")
    domains = [meter.domains[0] for meter in meters]
    assert [domain.name for domain in domains] == [f"gpu:{uuid}" for uuid in uuids]
    # The present limit of the slow one is 72 W, but it can be raised.
    assert [domain.highest_w for domain in domains] == [700.0, 700.0]
    assert [domain.update_period_s for domain in domains] == pytest.approx([0.05, 0.1], rel=0.2)
    assert [domain.flags for domain in domains] == [(), ()]
    before_ns = time.monotonic_ns() - 100 * MS
    first = [joules(meter) for meter in meters]
    time.sleep(0.3)
    second = [joules(meter) for meter in meters]
    end_ns = time.monotonic_ns()
    for meter, index, watts, before, after in zip(meters, (1, 0), (600, 50), first, second, strict=True):
        meter.close()
        assert watts * 0.2 - 0.01 <= after - before <= world.true_energy_j(index, before_ns, end_ns) + 0.01


def test_a_counter_is_described_by_its_domain(attach_boards: Callable[..., World]) -> None:
    domain = only_domain(attach_boards(Board(power_limit_w=450.0)))
    assert domain.limits(100.0, 1.0) == pytest.approx((75, 125))
    assert (domain.resolution_j, domain.update_period_s, domain.max_age_s) == (0.001, 0.1, None)
    assert (domain.coverage, domain.smear_s, domain.highest_w) == (1.0, 0.0, 700.0)
    assert domain.accuracy == "within 10% of the reading and 15 W"
    info = domain.info("nvml")
    assert (info.name, info.kind, info.source, info.scope) == ("nvml", "measured", COUNTER, "board")


def test_a_part_time_sensor_is_described_by_its_coverage(attach_boards: Callable[..., World]) -> None:
    domain = only_domain(attach_boards(Board(name="NVIDIA H100 80GB HBM3")))
    assert domain.coverage == pytest.approx(0.25)
    assert domain.accuracy.endswith("; its sensor samples 25% of the time")


def test_the_readings_of_a_continuous_counter_are_fresh(attach_boards: Callable[..., World]) -> None:
    result = CheckResult(duration_s=1.0, ticks=600, period_s=0.0015, continuous=True)
    with open_one_meter(attach_boards(Board()), result) as meter:
        assert meter.domains[0].max_age_s == 0.0015
        assert meter.poll_period_s == 0.01


@pytest.mark.parametrize(("period_s", "poll_s"), [(0.5, 0.01), (0.05, 0.005), (0.005, 0.002)])
def test_polls_are_a_tenth_of_a_tick_apart(
    attach_boards: Callable[..., World], period_s: float, poll_s: float
) -> None:
    with open_one_meter(
        attach_boards(Board()), CheckResult(duration_s=1.0, ticks=9, period_s=period_s)
    ) as meter:
        assert meter.poll_period_s == pytest.approx(poll_s)


@pytest.mark.parametrize(
    ("board", "counter", "power"),
    [
        (Board(), COUNTER, "NVML_FI_DEV_POWER_INSTANT"),
        (Board(unsupported_fields=(83,)), "NVML_FI_DEV_ENERGY", "NVML_FI_DEV_POWER_INSTANT"),
        (
            Board(unsupported_fields=(83, 191, 186)),
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlDeviceGetPowerUsage",
        ),
        (Board(energy_supported=False, power_usage_supported=False), None, "NVML_FI_DEV_POWER_INSTANT"),
        (
            Board(energy_supported=False, power_usage_supported=False, scopes=(1,)),
            None,
            "NVML_FI_DEV_POWER_INSTANT of the module",
        ),
        (Board(energy_supported=False, unsupported_fields=(186,)), None, "nvmlDeviceGetPowerUsage"),
        (Board(unsupported_fields=(186,), power_usage_supported=False), COUNTER, None),
    ],
)
def test_the_source_is_the_best_that_the_board_supports(
    attach_boards: Callable[..., World], board: Board, counter: str | None, power: str | None
) -> None:
    world = attach_boards(board)
    session = Session()
    sources = find_sources(session, session.open_board(world.board(0).uuid))
    session.close()
    assert (sources.counter.label if sources.counter else None) == counter
    assert (sources.power.label if sources.power else None) == power
    assert sources.cross_check == (sources.power if counter else None)


def without_gpu_scope(world: World, nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the board a Grace Hopper: no counter covers the GPU alone."""

    def refuse(_handle: object) -> int:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    world.update(0, scopes=(1,), unsupported_fields=(83,))
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", refuse)


def test_a_module_counter_is_flagged_with_what_it_includes(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "world", [Board(name="NVIDIA GH200 480GB", latch_ns=20 * MS)])
    without_gpu_scope(world, nvml_attach(world), monkeypatch)
    domain = only_domain(world)
    assert (domain.source, domain.scope, domain.highest_w) == ("NVML_FI_DEV_ENERGY", "module", None)
    (flag,) = domain.flags
    assert (flag.name, flag.severity) == ("meter", "warning")
    assert flag.detail == (
        f"{world.board(0).uuid}: the driver reports only the whole module, with its CPU and its memory"
    )
    with open_one_meter(world) as meter:
        before_j = joules(meter)
        time.sleep(0.1)
        assert joules(meter) - before_j >= 60 * 0.06


def test_a_module_counter_is_not_compared_with_the_power_of_the_gpu(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "world", [Board()])
    without_gpu_scope(world, nvml_attach(world), monkeypatch)
    world.update(0, unsupported_fields=(83, 186))
    session = Session()
    sources = find_sources(session, session.open_board(world.board(0).uuid))
    session.close()
    assert sources.counter is not None
    assert sources.counter.scope == "module"
    assert sources.power is not None
    assert (sources.power.scope, sources.cross_check) == ("board", None)


def test_a_board_without_sources_is_refused_with_the_answer_of_the_driver(
    tmp_path: Path, attach_boards: Callable[..., World]
) -> None:
    silent = Board(energy_supported=False, unsupported_fields=(186,), power_usage_supported=False)
    world = attach_boards(Board(), silent)
    with pytest.raises(MeterError) as raised:
        open_nvml(Targets((world.board(0).uuid, world.board(1).uuid)), tmp_path)
    assert str(raised.value) == (
        f"nvml: {world.board(1).uuid} (NVIDIA Sim RTX 4090) reports neither energy nor power (Not Supported)"
    )


def test_a_frozen_counter_is_replaced_by_integrated_power(
    tmp_path: Path, attach_boards: Callable[..., World]
) -> None:
    world = attach_boards(Board(power_w=60.0, frozen=True))
    uuid = world.board(0).uuid
    (meter,) = open_nvml(Targets((uuid,)), tmp_path)
    (domain,) = meter.domains
    assert (domain.source, domain.kind) == ("NVML_FI_DEV_POWER_INSTANT integrated", "measured")
    assert domain.resolution_j == pytest.approx(0.0001)
    flag, refresh = domain.flags
    assert (refresh.name, refresh.severity) == ("meter", "warning")
    assert refresh.detail == (
        f"{uuid}: NVML_FI_DEV_POWER_INSTANT changed too seldom while it was checked to show when it "
        "is refreshed; its joules may lag by up to 200 ms"
    )
    assert (flag.name, flag.severity) == ("meter", "warning")
    head, tail = flag.detail.split("stood still for 2.")
    assert head == f"{uuid}: energy counter rejected: "
    assert tail[1:] == " s while the board drew 60 W; NVML_FI_DEV_POWER_INSTANT is integrated instead"
    meter.close()


def test_a_counter_that_disagrees_with_power_is_replaced_by_integrated_power(
    tmp_path: Path, attach_boards: Callable[..., World]
) -> None:
    world = attach_boards(Board(power_w=300.0, latch_ns=20 * MS, energy_gain=0.57))
    (meter,) = open_nvml(Targets((world.board(0).uuid,)), tmp_path)
    flag, _ = meter.domains[0].flags
    assert ", integrated power" in flag.detail
    assert "(-43 %); NVML_FI_DEV_POWER_INSTANT is integrated instead" in flag.detail
    meter.close()


def test_integrated_power_gives_the_true_energy(attach_boards: Callable[..., World]) -> None:
    world = attach_boards(Board(power_w=200.0, energy_supported=False))
    with open_one_meter(world, CheckResult(duration_s=1.0, mean_w=200.0)) as meter:
        assert meter.domains[0].update_period_s == 0.1
        outer_ns = time.monotonic_ns()
        before_j = joules(meter)
        inner_ns = time.monotonic_ns()
        time.sleep(0.15)
        end_inner_ns = time.monotonic_ns()
        measured_j = joules(meter) - before_j
        end_outer_ns = time.monotonic_ns()
    assert measured_j >= world.true_energy_j(0, inner_ns, end_inner_ns) - 0.01
    assert measured_j <= world.true_energy_j(0, outer_ns, end_outer_ns) + 0.01


def test_integrated_power_has_the_refresh_period_found_by_the_self_check(
    attach_boards: Callable[..., World],
) -> None:
    world = attach_boards(Board(energy_supported=False))
    checked = CheckResult(duration_s=1.0, power_period_s=0.02, power_changes=50, mean_w=60.0)
    assert only_domain(world, checked).update_period_s == 0.02
    assert only_domain(world, checked).resolution_j == pytest.approx(0.00002)
    always = CheckResult(duration_s=1.0, power_period_s=0.0015, power_continuous=True, mean_w=60.0)
    assert only_domain(world, always).max_age_s == 0.0015


def test_power_usage_may_be_averaged(attach_boards: Callable[..., World]) -> None:
    world = attach_boards(Board(energy_supported=False, unsupported_fields=(186,)))
    domain = only_domain(world)
    assert (domain.source, domain.smear_s) == ("nvmlDeviceGetPowerUsage integrated", 1.0)
    assert domain.watch is not None
    assert domain.watch.averages is None


def test_a_rejected_counter_without_power_is_an_error(attach_boards: Callable[..., World]) -> None:
    world = attach_boards(Board(unsupported_fields=(186,), power_usage_supported=False))
    with pytest.raises(MeterError) as raised:
        only_domain(world, STILL)
    assert str(raised.value) == (
        f"nvml: {world.board(0).uuid}: energy counter rejected: stood still for 1.0 s while the board drew "
        "60 W; no power to integrate"
    )


def test_a_power_of_zero_watts_is_refused(attach_boards: Callable[..., World]) -> None:
    world = attach_boards(Board(power_w=0.0, energy_supported=False))
    with pytest.raises(MeterError) as raised:
        only_domain(world, CheckResult(duration_s=1.0, mean_w=0.0))
    assert str(raised.value) == (
        f"nvml: {world.board(0).uuid}: no energy counter; NVML_FI_DEV_POWER_INSTANT reads 0 W"
    )


def test_a_board_is_checked_once_and_again_after_a_new_driver(tmp_path: Path, nvml_attach: Attach) -> None:
    def calls_to_open(driver: str) -> int:
        world = World(tmp_path / "world", [Board(latch_ns=50 * MS)], driver_version=driver)
        nvml_attach(world)
        (meter,) = open_nvml(Targets((world.board(0).uuid,)), tmp_path / "cache")
        assert meter.domains[0].update_period_s == pytest.approx(0.05, rel=0.2)
        meter.close()
        return world.calls(0)

    first, again, other = calls_to_open("580.1"), calls_to_open("580.1"), calls_to_open("581.2")
    assert again < 20
    assert first > 5 * again
    assert other > 5 * again


def test_mig_instances_of_a_board_share_one_flagged_meter(
    tmp_path: Path, attach_boards: Callable[..., World]
) -> None:
    instances = (MigInstance("MIG-a", gpu_instance=1), MigInstance("MIG-b", gpu_instance=2))
    divided = Board(latch_ns=20 * MS, mig_enabled=True, mig_instances=instances)
    world = attach_boards(Board(latch_ns=20 * MS), divided)
    targets = (world.board(1).uuid, world.board(0).uuid, "MIG-a", "MIG-b")
    meters = open_nvml(Targets(targets), tmp_path)
    domains = [meter.domains[0] for meter in meters]
    assert [domain.name for domain in domains] == [f"gpu:{world.board(i).uuid}" for i in (1, 0)]
    assert [[flag.name for flag in domain.flags] for domain in domains] == [["meter"], []]
    assert (domains[0].scope, domains[0].flags[0].severity) == ("board", "warning")
    assert domains[0].flags[0].detail == (
        f"{world.board(1).uuid}: MIG instances have no energy counter: "
        "the joules are those of the whole board"
    )
    assert all(joules(meter) > 0 for meter in meters)
    for meter in meters:
        meter.close()


def test_a_lost_board_gives_a_reason_while_the_other_is_measured(
    tmp_path: Path, attach_boards: Callable[..., World]
) -> None:
    world = attach_boards(Board(latch_ns=20 * MS), Board(latch_ns=20 * MS))
    uuids = (world.board(0).uuid, world.board(1).uuid)
    lost, alive = open_nvml(Targets(uuids), tmp_path)
    world.update(0, lost=True)
    assert lost.read() == [f"nvml: GPU is lost ({uuids[0]})"]
    assert joules(alive) > 0
    lost.close()
    assert joules(alive) > 0
    alive.close()
    with pytest.raises(
        MeterError, match=rf"^nvml: {uuids[0]} does not answer \(GPU is lost\); see nvidia-smi -L$"
    ):
        open_nvml(Targets(uuids), tmp_path)


def test_an_unknown_board_is_refused_by_name(tmp_path: Path, attach_boards: Callable[..., World]) -> None:
    attach_boards(Board())
    with pytest.raises(
        MeterError, match=r"^nvml: GPU-none does not answer \(Not Found\); see nvidia-smi -L$"
    ):
        open_nvml(Targets(("GPU-none",)), tmp_path)


def test_nvml_is_shut_down_after_closing_and_after_errors(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(), Board(power_w=0.0, energy_supported=False)])
    nvml = nvml_attach(world)
    fit, dead = world.board(0).uuid, world.board(1).uuid
    (meter,) = open_nvml(Targets((fit,)), tmp_path)
    meter.close()
    for uuids in (("GPU-none",), (fit, dead)):
        with pytest.raises(MeterError):
            open_nvml(Targets(uuids), tmp_path)
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()


def test_nvml_does_not_apply_to_tests_without_gpus() -> None:
    with pytest.raises(MeterDoesNotApply, match=r"^nvml: the test uses no GPU$"):
        open_nvml(Targets())


def test_a_driver_that_denies_permission_is_named(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world).nvmlShutdown()
    world.set_init_result(NO_PERMISSION)
    with pytest.raises(MeterError, match=r"^nvml: Insufficient Permissions; see nvidia-smi$"):
        open_nvml(Targets((world.board(0).uuid,)), tmp_path)


def try_to_open(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_missing_nvml_library_is_named_with_its_remedy() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    message = try_to_open(bare)
    if message.startswith("library"):
        pytest.skip("this host has an NVIDIA driver")
    assert message == "nvml: Shared Library Not Found; install the NVIDIA driver"


def test_an_unloaded_driver_is_named_with_its_remedy(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board()], init_result=DRIVER_NOT_LOADED)
    message = try_to_open({**os.environ, **world.environment(nvml_library.parent)})
    assert message == "library: nvml: Driver Not Loaded; load the NVIDIA kernel module"


@pytest.mark.parametrize(
    ("product", "share"),
    [
        ("NVIDIA A100-SXM4-80GB", 0.25),
        ("A100-PCIE-40GB", 0.25),
        ("NVIDIA A800-SXM4-80GB", 0.25),
        ("NVIDIA A30", 0.25),
        ("NVIDIA H100 80GB HBM3", 0.25),
        ("NVIDIA H800", 0.25),
        ("NVIDIA H200 NVL", 0.25),
        ("NVIDIA GH200 480GB", 0.25),
        ("Tesla P100-PCIE-16GB", 0.5),
        ("Tesla V100-SXM2-32GB", 0.5),
        ("Quadro RTX 8000", 0.2),
        ("NVIDIA RTX A1000", 0.2),
        ("NVIDIA A10", 0.2),
        ("NVIDIA A30000", 0.2),
        ("NVIDIA GeForce RTX 4090", 1.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0.2),
        ("NVIDIA GeForce RTX 2080 Ti", 1.0),
        ("NVIDIA B200", 0.2),
    ],
)
def test_the_coverage_depends_on_the_product(product: str, share: float) -> None:
    assert sensor_coverage(product)[0] == pytest.approx(share)


def test_the_counter_of_an_h200_has_no_blind_time() -> None:
    assert counter_coverage("NVIDIA H200").share == 1.0
    assert counter_coverage("NVIDIA H100 80GB HBM3") == sensor_coverage("NVIDIA H100 80GB HBM3")


def test_a_board_whose_coverage_is_unknown_is_flagged(attach_boards: Callable[..., World]) -> None:
    domain = only_domain(attach_boards(Board(name="NVIDIA B200")))
    assert domain.coverage == pytest.approx(0.2)
    assert not domain.coverage_known
    assert [(flag.name, flag.severity) for flag in domain.flags] == [("meter", "warning")]
