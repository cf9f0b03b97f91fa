# SPDX-License-Identifier: Apache-2.0
"""Which devices fit a request, in which order they are tried, and what a shortage says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.compare.comparability import device_facts
from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.inventory import read_inventory
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.visibility import VISIBLE_DEVICES
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board as BoardInfo

from ..compare.runs import record_of
from ..nvml_sim import Board, MigInstance, World
from ..nvml_sim.boards import GIB, MIB

Attach = Callable[[World], ModuleType]
Host = Callable[..., list[str]]


@pytest.fixture
def host(tmp_path: Path, nvml_attach: Attach) -> Host:
    """Makes the boards of this machine. Gives their UUIDs."""

    def make(*boards: Board) -> list[str]:
        world = World(tmp_path / "world", boards)
        nvml_attach(world)
        return [world.board(index).uuid for index in range(len(boards))]

    return make


def using(memory_used: int, name: str = "NVIDIA H100") -> Board:
    return Board(name=name, memory_used=memory_used)


def part(uuid: str, gib: int = 10, slices: int = 1, gpu_instance: int = 1) -> MigInstance:
    return MigInstance(uuid, gib * GIB, gpu_instance=gpu_instance, gpu_slices=slices, compute_slices=slices)


def divided(*parts: MigInstance) -> Board:
    return Board(name="NVIDIA H100", mig_enabled=True, mig_instances=parts)


def choices(
    request: GpuRequest,
    selection: str | None = None,
    environment: Mapping[str, str] | None = None,
    warm: Collection[str] = (),
) -> tuple[str, ...]:
    return tuple(
        each.uuids[0] for each in select_devices(request, selection, environment or {}, warm).choices
    )


def refusal(request: GpuRequest, selection: str | None = None, visible: str | None = None) -> str:
    environment = {} if visible is None else {VISIBLE_DEVICES: visible}
    with pytest.raises(DeviceError) as caught:
        select_devices(request, selection, environment)
    return str(caught.value)


def test_idle_boards_come_first_then_those_with_the_least_in_use(host: Host) -> None:
    a, b, c, d = host(using(30 * GIB), using(600 * MIB), using(2 * GIB), using(4 * MIB))
    assert choices(GpuRequest(2)) == (d, b, c, a)
    assert select_devices(GpuRequest(2), environment={}).uuids == (b, d)


def test_idle_boards_keep_the_order_of_the_environment(host: Host) -> None:
    a, b, c = host(using(4 * MIB), using(12 * MIB), using(0))
    assert choices(GpuRequest(1)) == (a, b, c)
    assert choices(GpuRequest(1), environment={VISIBLE_DEVICES: "2,0,1"}) == (c, a, b)


def test_a_board_with_warm_ranks_comes_before_idle_ones(host: Host) -> None:
    a, b, c = host(using(0), using(0), using(40 * GIB))
    assert choices(GpuRequest(1), environment={}, warm={c}) == (c, a, b)


def test_several_boards_are_of_one_model(host: Host) -> None:
    a, b, c, d = host(*(Board(name=name) for name in ("H100", "L4", "H100", "L4")))
    assert choices(GpuRequest(1)) == (a, b, c, d)
    assert choices(GpuRequest(2)) == (a, c)
    # Unless no model has enough.
    assert choices(GpuRequest(3)) == (a, b, c, d)


def test_boards_that_cannot_be_compared_are_of_different_models(host: Host) -> None:
    """Two that differ in memory, or in the power that they may draw."""
    host(Board(), Board(), Board(power_limit_w=300.0), Board(memory_total=40 * GIB), Board(name="NVIDIA L4"))
    boards = read_inventory().boards
    records = [record_of(devices=[each.uuid], boards=[each]) for each in boards]
    for board, record in zip(boards, records, strict=True):
        same = [choice.uuids[0] for choice in select_devices(GpuRequest(1), None, {}, (), [board]).choices]
        facts = device_facts(record, None)
        assert same == [other.devices[0] for other in records if device_facts(other, None) == facts]


def test_a_test_that_ran_before_gets_the_same_model(host: Host) -> None:
    a, b, c = host(Board(name="NVIDIA H100"), Board(name="NVIDIA L4"), Board(name="NVIDIA L4"))
    h100, l4, _ = read_inventory().boards

    def again(n: int, *before: BoardInfo) -> tuple[str, ...]:
        return tuple(each.uuids[0] for each in select_devices(GpuRequest(n), None, {}, (), before).choices)

    assert again(1, l4) == (b, c)
    assert again(1, h100) == (a,)
    # More boards than there are of it, a model that this host lacks, and boards of two models.
    assert again(2, h100) == (b, c)
    assert again(1, BoardInfo(uuid="GPU-x", name="NVIDIA A100", pci_bus_id="")) == (a, b, c)
    assert again(3, h100, l4, l4) == (a, b, c)


@pytest.mark.parametrize(
    ("total_mib", "asked"),
    [(40536, "40 GB"), (143771, "141 GB"), (81559, "80 GB"), (81559, "79 GiB"), (15360, "16 GB")],
)
def test_a_board_counts_with_the_memory_it_is_sold_with(host: Host, total_mib: int, asked: str) -> None:
    (uuid,) = host(Board(memory_total=total_mib * MIB))
    assert choices(GpuRequest(memory=asked)) == (uuid,)


def test_too_little_memory_is_reported_in_the_requested_unit(host: Host) -> None:
    small = Board(name="NVIDIA L4", memory_total=24 * 10**9)
    host(small, Board(name="NVIDIA H100", memory_total=81559 * MIB), small, small)
    assert refusal(GpuRequest(2, memory="80 GB")) == (
        "gpus(2, memory='80 GB'): only 1 of 4 GPUs fit (others: 3 × 24 GB)"
    )
    assert refusal(GpuRequest(1, memory="80 GiB")) == (
        "gpus(1, memory='80 GiB'): only 0 of 4 GPUs fit (others: 3 × 22.3 GiB, 79.6 GiB)"
    )


class TestMig:
    def test_a_profile_selects_only_instances(self, host: Host) -> None:
        host(
            Board(name="NVIDIA H100"),
            divided(part("MIG-a"), part("MIG-b", 20, 2, 2), part("MIG-c", 10, 1, 3)),
        )
        assert choices(GpuRequest(2, mig="1g.10gb")) == ("MIG-a", "MIG-c")
        assert choices(GpuRequest(1, mig="2G.20GB"), "all", {VISIBLE_DEVICES: ""}) == ("MIG-b",)

    def test_a_shortage_lists_the_other_profiles(self, host: Host) -> None:
        host(divided(part("MIG-a"), part("MIG-b", 20, 2, 2), part("MIG-c", 20, 2, 3), part("MIG-d", 9, 0, 4)))
        assert refusal(GpuRequest(2, mig="1g.10gb")) == (
            "gpus(2, mig='1g.10gb'): only 1 of 4 MIG instances fit (others: 2 × 2g.20gb, unknown profile)"
        )

    def test_a_listed_board_allows_the_instances_that_cuda_would_show(self, host: Host) -> None:
        board = host(divided(part("MIG-a"), part("MIG-b")))[0]
        assert choices(GpuRequest(1, mig="1g.10gb"), environment={VISIBLE_DEVICES: board}) == ("MIG-a",)
        assert choices(GpuRequest(1, mig="1g.10gb"), environment={VISIBLE_DEVICES: "MIG-b"}) == ("MIG-b",)

    def test_a_board_in_mig_mode_without_instances_cannot_be_used(self, host: Host) -> None:
        whole, _ = host(Board(), Board(mig_enabled=True))
        assert choices(GpuRequest(1)) == (whole,)
        assert refusal(GpuRequest(2)) == (
            "gpus(2): only 1 of 2 GPUs may be used here (1 in MIG mode without instances and cannot be "
            "used (nvidia-smi mig -cgi PROFILE -C makes instances, nvidia-smi -mig 0 ends the mode))"
        )
