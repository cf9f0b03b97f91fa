# SPDX-License-Identifier: Apache-2.0
"""Which devices fit a request, in which order they are tried, and what a shortage says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allocation import ShortageError, select_devices
from pytest_llenergy.devices.lease import DeviceLock
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.visibility import DEVICE_ORDER, VISIBLE_DEVICES
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, MigInstance, World
from ..nvml_sim.boards import GIB, MIB

Attach = Callable[[World], ModuleType]
Host = Callable[..., list[str]]
DRIVER_NOT_LOADED = 9


@pytest.fixture
def uuids(tmp_path: Path, nvml_attach: Attach) -> list[str]:
    boards = (Board(name="NVIDIA L4"), Board(name="NVIDIA H100"), Board(name="NVIDIA H100"))
    world = World(tmp_path / "world", boards)
    nvml_attach(world)
    return [world.board(index).uuid for index in range(3)]


def test_a_test_without_a_request_leases_the_cpu() -> None:
    lease = select_devices(None)
    assert (lease.devices, lease.uuids, lease.fallback, lease.visible_devices) == (("cpu",), (), None, "")


def test_boards_are_leased_in_the_order_of_the_environment(uuids: list[str]) -> None:
    assert select_devices(GpuRequest(3), environment={}).uuids == tuple(uuids)
    lease = select_devices(GpuRequest(2), environment={VISIBLE_DEVICES: f"{uuids[2]},{uuids[0]}"})
    assert lease.uuids == lease.devices == (uuids[2], uuids[0])
    assert lease.indices == (2, 0)
    assert lease.names == ("NVIDIA H100", "NVIDIA L4")
    assert lease.visible_devices == f"{uuids[2]},{uuids[0]}"
    assert lease.fallback is None


@pytest.mark.parametrize("value", ["", "-1"])
def test_an_environment_that_allows_no_gpu_is_obeyed_and_named(uuids: list[str], value: str) -> None:
    with pytest.raises(DeviceError) as caught:
        select_devices(GpuRequest(2), environment={VISIBLE_DEVICES: value})
    assert str(caught.value) == (
        f"gpus(2): only 0 of 3 GPUs may be used here (CUDA_VISIBLE_DEVICES={value!r}; --energy-gpus=all "
        "overrides it on purpose)"
    )


@pytest.mark.parametrize(("selection", "chosen"), [("all", (1, 2)), ("2,1", (2, 1))])
def test_the_option_overrides_the_environment(
    uuids: list[str], selection: str, chosen: tuple[int, ...]
) -> None:
    lease = select_devices(GpuRequest(2), selection, {VISIBLE_DEVICES: ""})
    assert lease.indices == chosen
    assert lease.uuids == tuple(uuids[index] for index in chosen)


def test_too_few_boards_are_a_shortage_that_counts_them(uuids: list[str]) -> None:
    with pytest.raises(DeviceError, match=r"^gpus\(4\): only 3 of 3 GPUs may be used here$"):
        select_devices(GpuRequest(4), environment={})
    with pytest.raises(DeviceError, match=r"^gpus\(2\): only 1 of 3 GPUs may be used here \(CUDA_VIS"):
        select_devices(GpuRequest(2), environment={VISIBLE_DEVICES: "1", DEVICE_ORDER: "PCI_BUS_ID"})


def divided(*uuids: str) -> Board:
    parts = tuple(MigInstance(uuid, gpu_instance=place + 1) for place, uuid in enumerate(uuids))
    return Board(name="NVIDIA H100", memory_total=80 * GIB, mig_enabled=True, mig_instances=parts)


@pytest.fixture
def parted(tmp_path: Path, nvml_attach: Attach) -> World:
    """A whole board, and two that are divided."""
    world = World(
        tmp_path / "world", [Board(name="NVIDIA H100"), divided("MIG-a", "MIG-b"), divided("MIG-c")]
    )
    nvml_attach(world)
    return world


def test_an_instance_is_leased_as_a_gpu_of_its_own(parted: World) -> None:
    lease = select_devices(GpuRequest(1), environment={VISIBLE_DEVICES: "MIG-b,"})
    assert lease.devices == lease.uuids == ("MIG-b",)
    assert (lease.names, lease.indices) == (("NVIDIA H100 MIG 1g.10gb",), (1,))
    assert lease.visible_devices == "MIG-b"
    assert lease.divided == (parted.board(1).uuid,)
    ranks = select_devices(GpuRequest(2, name="1g.10gb"), "MIG-b,MIG-c", {VISIBLE_DEVICES: ""})
    assert (ranks.uuids, ranks.indices) == (("MIG-b", "MIG-c"), (1, 2))


def test_an_instance_is_leased_with_a_share_of_its_board(parted: World) -> None:
    """Their joules are one number, which the flag meter says; they may be used side by side."""
    board = DeviceLock(parted.board(1).uuid, shared=True)
    for uuid in ("MIG-a", "MIG-b"):
        assert select_devices(GpuRequest(1), uuid, {}).request().choices == ((DeviceLock(uuid), board),)


def test_divided_boards_are_not_leased_whole(parted: World) -> None:
    assert select_devices(GpuRequest(1), environment={}).uuids == (parted.board(0).uuid,)
    assert select_devices(GpuRequest(1), "all", {}).uuids == (parted.board(0).uuid,)
    with pytest.raises(DeviceError) as caught:
        select_devices(GpuRequest(2), environment={})
    assert str(caught.value) == (
        "gpus(2): only 1 of 3 GPUs may be used here (2 divided by MIG; name instances with "
        "--energy-gpus=MIG-a,MIG-b,MIG-c)"
    )


def test_instances_are_leased_if_all_boards_are_divided(tmp_path: Path, nvml_attach: Attach) -> None:
    """So it is in a container that was given one instance: the driver shows that, and its board."""
    nvml_attach(World(tmp_path / "world", [divided("MIG-a")]))
    for environment in ({}, {VISIBLE_DEVICES: "0"}):
        assert select_devices(GpuRequest(1), environment=environment).uuids == ("MIG-a",)


def test_ranks_run_on_the_cpu_only_with_a_fallback(uuids: list[str]) -> None:
    lease = select_devices(GpuRequest(4, fallback="cpu"), environment={VISIBLE_DEVICES: ""})
    assert (lease.devices, lease.fallback, lease.uuids) == (("cpu",) * 4, "cpu", ())
    assert select_devices(GpuRequest(3, fallback="cpu"), environment={}).fallback is None
    # Two hosts, of which this is one.
    assert select_devices(GpuRequest(4, per_host=2, fallback="cpu"), environment={}).devices == ("cpu",) * 4


@pytest.mark.parametrize("selection", ["9", "0,0", "all,0", "MIG-x"])
def test_a_selection_of_a_missing_device_is_an_error_not_a_shortage(uuids: list[str], selection: str) -> None:
    with pytest.raises(DeviceError, match=r"^--energy-gpus: '.*' ") as caught:
        select_devices(GpuRequest(1, fallback="cpu"), selection, {})
    assert not isinstance(caught.value, ShortageError)


@pytest.fixture
def lost(tmp_path: Path, nvml_attach: Attach) -> World:
    """Four boards, the second of which is lost."""
    world = World(tmp_path / "world", [Board()] * 4)
    nvml_attach(world)
    world.update(1, lost=True)
    return world


class TestLostBoard:
    def test_the_remaining_boards_are_leased_by_uuid(self, lost: World) -> None:
        lease = select_devices(GpuRequest(3), environment={})
        assert lease.uuids == tuple(lost.board(place).uuid for place in (0, 2, 3))
        assert lease.indices == (0, 2, 3), "the lost one keeps its place"
        third = lost.board(3).uuid
        assert select_devices(GpuRequest(1), environment={VISIBLE_DEVICES: third}).uuids == (third,)
        assert select_devices(GpuRequest(1), third, {}).indices == (3,)

    @pytest.mark.parametrize("selection", [None, "all"])
    def test_a_shortage_caused_by_the_lost_board_is_an_error(
        self, lost: World, selection: str | None
    ) -> None:
        for fallback in (None, "cpu"):
            with pytest.raises(DeviceError) as caught:
                select_devices(GpuRequest(4, fallback=fallback), selection, {})
            assert not isinstance(caught.value, ShortageError)
            assert str(caught.value) == (
                "gpus(4): 3 GPUs fit; NVML: GPU 1 does not answer (GPU is lost); see nvidia-smi"
            )

    def test_a_shortage_with_other_causes_still_skips(self, lost: World) -> None:
        with pytest.raises(ShortageError, match=r"^gpus\(5\): only 3 of 3 GPUs"):
            select_devices(GpuRequest(5), environment={})
        with pytest.raises(ShortageError, match="only 0 of 3 GPUs may be used here"):
            select_devices(GpuRequest(1), environment={VISIBLE_DEVICES: ""})


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
