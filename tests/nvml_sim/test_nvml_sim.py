# SPDX-License-Identifier: Apache-2.0
"""The stand-in behind the real pynvml, in this process: what each call returns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from .boards import GIB, Board, Fault, MigInstance, Process
from .layout import THROTTLE_FIELDS
from .shapes import Burst
from .world import World

Attach = Callable[[World], ModuleType]
MS = 1_000_000


def world_of(tmp_path: Path, *boards: Board) -> World:
    return World(tmp_path / "world", boards or (Board(),))


def test_boards_are_listed_in_pci_order_with_their_uuids(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(), Board(name="Other"), Board(pci_bus_id="00000001:00:00.0"))
    nvml = nvml_attach(world)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    assert [nvml.nvmlDeviceGetUUID(h) for h in handles] == [world.board(i).uuid for i in range(3)]
    assert [nvml.nvmlDeviceGetIndex(h) for h in handles] == [0, 1, 2]
    bus_ids = [nvml.nvmlDeviceGetPciInfo(h).busId for h in handles]
    assert bus_ids == sorted(bus_ids)
    assert bus_ids[2] == "00000001:00:00.0"
    assert nvml.nvmlDeviceGetName(handles[1]) == "Other"
    for lookup, keys in (
        (nvml.nvmlDeviceGetHandleByUUID, [world.board(i).uuid for i in range(3)]),
        (nvml.nvmlDeviceGetHandleByPciBusId, ["0:17:0.0", "0000:25:00.0", bus_ids[2].lower()]),
    ):
        assert [nvml.nvmlDeviceGetIndex(lookup(key)) for key in keys] == [0, 1, 2]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-none")
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(3)


def test_boards_out_of_pci_order_are_refused(tmp_path: Path) -> None:
    boards = (Board(pci_bus_id="00000000:3B:00.0"), Board(pci_bus_id="00000000:1A:00.0"))
    with pytest.raises(ValueError, match="ascending PCI order"):
        world_of(tmp_path, *boards)


def test_energy_equals_the_truth_at_the_last_latch(tmp_path: Path, nvml_attach: Attach) -> None:
    latch, phase = 5 * MS, 1_234_567
    world = world_of(
        tmp_path, Board(power_w=333.25, latch_ns=latch, latch_phase_ns=phase, energy_offset_mj=7)
    )
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    for power in (333.25, 90.0, Burst(80.0, 650.0, 3 * MS, 0.3), 120.0):
        world.set_power(0, power)
        time.sleep(0.012)
        before = time.monotonic_ns()
        counter = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        after = time.monotonic_ns()
        ticks = range(before - (before - phase) % latch, after + 1, latch)
        allowed = [7 + int(world.true_energy_j(0, 0, tick) * 1000) for tick in ticks]
        assert any(abs(counter - value) <= 1 for value in allowed)


def test_the_counter_moves_only_at_latches(tmp_path: Path, nvml_attach: Attach) -> None:
    latch = 20 * MS
    world = world_of(tmp_path, Board(power_w=500.0, latch_ns=latch))
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    values = []
    begin = time.monotonic_ns()
    while time.monotonic_ns() < begin + 6 * latch:
        values.append(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    steps = {b - a for a, b in itertools.pairwise(values) if b != a}
    assert len(set(values)) <= (time.monotonic_ns() - begin) // latch + 2
    # A reader that was not scheduled for a while may miss a latch, but never reads part of one.
    assert steps
    assert all(step % 10_000 == 0 for step in steps)


def test_gain_offset_and_freezing_change_the_counter(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(power_w=100.0, latch_ns=0, energy_offset_mj=0))
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    world.update(0, frozen=True)
    stale = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    time.sleep(0.01)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == stale
    world.update(0, energy_gain=0.5)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == pytest.approx(stale / 2, abs=1)
    world.update(0, energy_gain=1.0, energy_offset_mj=-1000)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == stale - 1000
    world.update(0, frozen=False)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) > stale - 1000


def test_power_is_instant_or_averaged_over_a_second(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(power_w=100.0), Board(power_w=100.0, power_usage_averaged=False))
    nvml = nvml_attach(world)
    for index, averaged in ((0, True), (1, False)):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        world.set_power(index, 400.0)
        before = time.monotonic_ns()
        average, instant = nvml.nvmlDeviceGetFieldValues(handle, [185, (186, 0)])
        after = time.monotonic_ns()
        usage = nvml.nvmlDeviceGetPowerUsage(handle)
        assert instant.value.uiVal == 400_000
        assert world.true_power_w(index, before) == 400.0
        low, high = (int(world.true_energy_j(index, t - 1000 * MS, t) * 1000) for t in (before, after))
        assert low - 1 <= average.value.uiVal <= high + 1
        assert usage >= average.value.uiVal if averaged else usage == 400_000
        assert nvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 700_000


@pytest.mark.parametrize(("duty", "milliwatts"), [(0.5, 500_000), (0.05, 100_000)])
def test_a_burst_begins_with_its_high_part(
    tmp_path: Path, nvml_attach: Attach, duty: float, milliwatts: int
) -> None:
    # The world began 10 s ago: a high part of 50 s still lasts, one of 5 s is over.
    world = world_of(tmp_path, Board(burst=Burst(100.0, 500.0, 100_000 * MS, duty)))
    nvml = nvml_attach(world)
    values = nvml.nvmlDeviceGetFieldValues(nvml.nvmlDeviceGetHandleByIndex(0), [185, 186])
    assert [value.value.uiVal for value in values] == [milliwatts] * 2


@pytest.mark.parametrize("code", [83, 185, 186, 191])
def test_each_field_can_be_unsupported(tmp_path: Path, nvml_attach: Attach, code: int) -> None:
    nvml = nvml_attach(world_of(tmp_path, Board(unsupported_fields=(code,))))
    codes = [83, 185, 186, 191]
    values = nvml.nvmlDeviceGetFieldValues(nvml.nvmlDeviceGetHandleByIndex(0), codes)
    expected = {known: nvml.NVML_ERROR_NOT_SUPPORTED if known == code else 0 for known in codes}
    assert {value.fieldId: value.nvmlReturn for value in values} == expected


def test_energy_is_refused_without_a_counter_and_for_unlisted_scopes(
    tmp_path: Path, nvml_attach: Attach
) -> None:
    nvml = nvml_attach(world_of(tmp_path, Board(energy_supported=False), Board(scopes=(1,))))
    bare, module = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTotalEnergyConsumption(bare)
    assert [v.nvmlReturn for v in nvml.nvmlDeviceGetFieldValues(bare, [83, 191, 186, 999])] == [3, 3, 0, 3]
    fields = [(191, 0), (191, 1), (186, 0), (186, 1)]
    assert [v.nvmlReturn for v in nvml.nvmlDeviceGetFieldValues(module, fields)] == [3, 0, 3, 0]


def test_every_query_of_a_lost_board_fails(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(), Board())
    nvml = nvml_attach(world)
    lost, alive = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    world.update(0, lost=True)
    assert nvml.nvmlDeviceGetCount() == 2
    for query in (
        nvml.nvmlDeviceGetUUID,
        nvml.nvmlDeviceGetTotalEnergyConsumption,
        nvml.nvmlDeviceGetMemoryInfo,
    ):
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            query(lost)
        query(alive)
    lookups: list[Callable[[], object]] = [
        lambda: nvml.nvmlDeviceGetHandleByIndex(0),
        lambda: nvml.nvmlDeviceGetHandleByUUID(world.board(0).uuid),
        lambda: nvml.nvmlDeviceGetFieldValues(lost, [83]),
    ]
    for lookup in lookups:
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            lookup()


def test_a_board_can_be_lost_for_a_while(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path)
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    now_ns = time.monotonic_ns()
    world.add_fault(0, Fault("lost", now_ns, now_ns + 1000 * MS))
    world.add_fault(0, Fault("lost", now_ns + 3600_000 * MS))
    with pytest.raises(nvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    # The stand-in goes by the real clock.
    time.sleep(1.0)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) > 0


def test_mig_instances_have_a_uuid_but_no_energy(tmp_path: Path, nvml_attach: Attach) -> None:
    instances = (
        MigInstance("MIG-1", memory_total=20 * GIB, gpu_slices=2),
        MigInstance("MIG-2", gpu_instance=2, gpu_slices=0),
    )
    held = (Process(10, gpu_instance=1), Process(20, gpu_instance=2))
    world = world_of(tmp_path, Board(mig_instances=instances, processes=held), Board(mig_capable=False))
    nvml = nvml_attach(world)
    board, old = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    assert nvml.nvmlDeviceGetMigMode(board) == [0, 0]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(old) == 0
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetMigMode(old)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, 0)

    world.update(0, mig_enabled=True)
    assert nvml.nvmlDeviceGetMigMode(board) == [1, 1]
    first, second = (nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, i) for i in range(2))
    assert [nvml.nvmlDeviceGetUUID(h) for h in (first, second)] == ["MIG-1", "MIG-2"]
    assert nvml.nvmlDeviceGetMemoryInfo(first).total == 20 * GIB
    attributes = nvml.nvmlDeviceGetAttributes(first)
    slices = (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount)
    assert (slices, attributes.memorySizeMB) == ((2, 1), 20 * 1024)
    for without in (board, second):
        with pytest.raises(nvml.NVMLError_NotSupported):
            nvml.nvmlDeviceGetAttributes(without)
    assert [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(second)] == [20]
    parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID("MIG-2"))
    assert nvml.nvmlDeviceGetUUID(parent) == world.board(0).uuid
    for query in (nvml.nvmlDeviceGetTotalEnergyConsumption, nvml.nvmlDeviceGetPowerUsage):
        with pytest.raises(nvml.NVMLError_NotSupported):
            query(first)
    assert {v.nvmlReturn for v in nvml.nvmlDeviceGetFieldValues(first, [83, 185, 186, 191])} == {3}
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(board) == 8
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, 2)


def test_processes_memory_and_condition_are_reported(tmp_path: Path, nvml_attach: Attach) -> None:
    held = (Process(11, 5 * GIB), Process(12, None), Process(13, graphics=True))
    throttle = {74: 1, 76: 2, 269: 3, 270: 4, 271: 5}
    board = Board(
        processes=held, throttle_ns=throttle, event_reasons=4, temperature_c=71, memory_used=9 * GIB
    )
    world = world_of(tmp_path, board)
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert [(p.pid, p.usedGpuMemory) for p in listed] == [(11, 5 * GIB), (12, None)]
    assert [p.pid for p in nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)] == [13]
    assert [v.value.ullVal for v in nvml.nvmlDeviceGetFieldValues(handle, list(throttle))] == [1, 2, 3, 4, 5]
    assert nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == nvml.nvmlClocksEventReasonSwPowerCap
    assert nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU) == 71
    assert nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) == 2619
    for version in (None, nvml.nvmlMemory_v2):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        assert (memory.total, memory.used, memory.free) == (80 * GIB, 9 * GIB, 71 * GIB)
    assert nvml.nvmlDeviceGetPersistenceMode(handle) == 1
    assert nvml.nvmlDeviceGetCudaComputeCapability(handle) == (9, 0)
    assert nvml.nvmlDeviceGetArchitecture(handle) == nvml.NVML_DEVICE_ARCH_HOPPER
    assert nvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert nvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert nvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    world.update(0, processes=(), temperature_c=50)
    assert nvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert world.board(0).temperature_c == 50
    assert dict(world.board(0).throttle_ns) == throttle


def test_slow_calls_take_their_delay_and_are_counted(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(call_delay_ns=5 * MS), Board())
    nvml = nvml_attach(world)
    slow, fast = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    counts = [world.calls(i) for i in range(2)]
    begin = time.monotonic_ns()
    (value,) = nvml.nvmlDeviceGetFieldValues(slow, [83])
    assert time.monotonic_ns() - begin >= 5 * MS
    assert value.latencyUsec >= 5000
    assert abs(value.timestamp / 1e6 - time.time()) < 5
    nvml.nvmlDeviceGetUUID(fast)
    assert [world.calls(i) - counts[i] for i in range(2)] == [1, 1]


def test_a_slow_call_returns_the_value_of_its_end_or_its_start(tmp_path: Path, nvml_attach: Attach) -> None:
    late = Board(call_delay_ns=20 * MS, latch_ns=0)
    world = world_of(tmp_path, late, replace(late, call_delay_before=False))
    nvml = nvml_attach(world)
    seen = []
    for index in range(2):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        begin_ns = time.monotonic_ns()
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [83])
        end_ns, end_us = time.monotonic_ns(), time.time_ns() / 1000
        seen.append((value, begin_ns, end_ns, end_us))
    value, begin_ns, end_ns, _ = seen[0]
    low, high = (world.counter_mj(0, at_ns) for at_ns in (begin_ns + 20 * MS, end_ns))
    assert low <= value.value.ullVal <= high
    value, begin_ns, end_ns, end_us = seen[1]
    low, high = (world.counter_mj(1, at_ns) for at_ns in (begin_ns, end_ns - 20 * MS))
    assert low <= value.value.ullVal <= high
    assert value.timestamp <= end_us - 19_000


def test_only_every_nth_call_is_slow(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(call_delay_ns=30 * MS, call_delay_every=4))
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    latency_us: dict[bool, list[int]] = {True: [], False: []}
    while world.calls(0) < 12:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [83])
        latency_us[world.calls(0) % 4 == 0].append(value.latencyUsec)
    assert len(latency_us[True]) == 3
    assert min(latency_us[True]) >= 30_000
    assert min(latency_us[False]) < 30_000


def test_a_board_can_deny_permission(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(), Board())
    nvml = nvml_attach(world)
    closed, open_board = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    world.update(0, no_permission=True)
    queries: list[Callable[[], object]] = [
        lambda: nvml.nvmlDeviceGetHandleByIndex(0),
        lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(closed),
        lambda: nvml.nvmlDeviceGetFieldValues(closed, [83]),
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses(closed),
    ]
    for query in queries:
        with pytest.raises(nvml.NVMLError_NoPermission):
            query()
    nvml.nvmlDeviceGetTotalEnergyConsumption(open_board)
    world.update(0, no_permission=False)
    nvml.nvmlDeviceGetTotalEnergyConsumption(closed)


def test_power_limits_and_highest_clocks_are_reported(tmp_path: Path, nvml_attach: Attach) -> None:
    limited = Board(
        power_limit_w=250.0, power_limit_min_w=100.0, power_limit_max_w=350.0, power_limit_default_w=300.0
    )
    world = world_of(tmp_path, replace(limited, clocks_mhz=(1, 2, 3, 4), max_clocks_mhz=(10, 20, 30, 40)))
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle) == [100_000, 350_000]
    assert nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) == 300_000
    assert nvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 250_000
    assert [nvml.nvmlDeviceGetClockInfo(handle, i) for i in range(4)] == [1, 2, 3, 4]
    assert [nvml.nvmlDeviceGetMaxClockInfo(handle, i) for i in range(4)] == [10, 20, 30, 40]
    assert [nvml.nvmlDeviceGetClock(handle, 1, i) for i in (0, 3)] == [2, 20]
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetClock(handle, 1, 1)


def test_a_foreign_process_can_come_and_go(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(processes=(Process(11),)))
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    world.update(0, processes=(*world.board(0).processes, Process(4242, None)))
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert [(p.pid, p.usedGpuMemory) for p in listed] == [(11, GIB), (4242, None)]
    world.update(0, processes=(Process(11),))
    assert [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [11]


def test_a_stored_board_is_read_back_unchanged(tmp_path: Path) -> None:
    board = Board(
        uuid="GPU-1",
        pci_bus_id="00000000:3B:00.0",
        power_limit_w=250.0,
        power_limit_min_w=100.0,
        power_limit_max_w=350.0,
        power_limit_default_w=300.0,
        energy_gain=0.5,
        latch_ns=50,
        latch_phase_ns=-7,
        latch_jitter_ns=49,
        sensor_window_ns=12,
        power_latch_ns=40,
        power_window_ns=8,
        scopes=(0, 1),
        module_factor=1.25,
        call_delay_ns=3,
        call_delay_every=9,
        call_delay_before=False,
        no_permission=True,
        throttle_ns=dict.fromkeys(THROTTLE_FIELDS, 0),
        max_clocks_mhz=(5, 6, 7, 8),
    )
    world = world_of(tmp_path, board)
    assert world.board(0) == board
    world.update(0, temperature_c=41)
    assert world.board(0) == replace(board, temperature_c=41)
