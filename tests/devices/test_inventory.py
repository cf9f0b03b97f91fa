# SPDX-License-Identifier: Apache-2.0
"""What NVML shows of a host, and boards that do not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.inventory import Inventory, read_answering, read_inventory, read_used_bytes
from pytest_llenergy.devices.mig import Instance
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, MigInstance, World
from ..nvml_sim.boards import GIB
from ..nvml_sim.world import NO_PERMISSION

Attach = Callable[[World], ModuleType]
DRIVER_NOT_LOADED = 9


def test_boards_are_listed_in_pci_order_with_their_properties(tmp_path: Path, nvml_attach: Attach) -> None:
    given = (
        Board(name="NVIDIA L4", memory_total=24 * GIB, power_limit_w=72.0, temperature_c=33),
        Board(name="NVIDIA H100", memory_total=80 * GIB, power_limit_w=700.0, temperature_c=66),
    )
    world = World(tmp_path / "world", given, driver_version="580.1")
    nvml_attach(world)
    found = read_inventory().boards
    assert [(board.name, board.memory_bytes, board.power_limit_w) for board in found] == [
        ("NVIDIA L4", 24 * GIB, 72.0),
        ("NVIDIA H100", 80 * GIB, 700.0),
    ]
    assert [board.uuid for board in found] == [world.board(index).uuid for index in range(2)]
    assert [board.pci_bus_id for board in found] == sorted(
        world.board(index).pci_bus_id for index in range(2)
    )
    assert read_inventory().driver == "580.1"


def test_a_lost_board_is_named(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(), Board()])
    nvml_attach(world)
    world.update(1, lost=True)
    with pytest.raises(DeviceError, match=r"^NVML: GPU 1 does not answer \(GPU is lost\); see nvidia-smi$"):
        read_inventory()


def test_a_driver_that_refuses_is_not_a_host_without_gpus(tmp_path: Path, nvml_attach: Attach) -> None:
    """Else a test with fallback="cpu" would run there, for a reason that is not the real one."""
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world).nvmlShutdown()
    world.set_init_result(NO_PERMISSION)
    with pytest.raises(DeviceError, match=r"^NVML: Insufficient Permissions; see nvidia-smi$"):
        read_inventory()
    with pytest.raises(DeviceError, match=r"^NVML: "):
        select_devices(GpuRequest(1, fallback="cpu"), environment={})


def test_boards_that_answer_are_listed_despite_others_that_do_not(
    tmp_path: Path, nvml_attach: Attach
) -> None:
    world = World(tmp_path / "world", [Board(lost=True), Board(), Board(no_permission=True), Board()])
    nvml_attach(world)
    found = read_answering()
    assert found.uuids == (world.board(1).uuid, world.board(3).uuid)
    assert [found.index(uuid) for uuid in found.uuids] == [1, 3]
    assert list(found.lost.values()) == [
        "NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi",
        "NVML: GPU 2 does not answer (Insufficient Permissions); see nvidia-smi",
    ]


def test_the_reason_of_a_driver_that_refuses_is_kept(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world).nvmlShutdown()
    world.set_init_result(NO_PERMISSION)
    assert read_answering() == Inventory(errors=("NVML: Insufficient Permissions; see nvidia-smi",))


def test_instances_are_listed_with_their_profiles(tmp_path: Path, nvml_attach: Attach) -> None:
    """Profiles and memories as the driver tells them of an H100 of 80 GB."""
    mib = 1 << 20
    parts = (
        MigInstance("MIG-1", 9856 * mib, gpu_instance=9),
        MigInstance("MIG-2", 40320 * mib, gpu_instance=2, gpu_slices=3, compute_slices=1),
        MigInstance("MIG-3", 40320 * mib, gpu_instance=2, compute_instance=1, gpu_slices=3, compute_slices=2),
        MigInstance("MIG-4", gpu_instance=7, gpu_slices=0),
    )
    given = [
        Board(mig_capable=False),
        Board(mig_instances=parts),
        Board(name="NVIDIA H100", memory_total=81559 * mib, mig_enabled=True, mig_instances=parts),
        Board(mig_enabled=True),
    ]
    world = World(tmp_path / "world", given, driver_version="580.1")
    nvml_attach(world)
    found, uuid = read_inventory(), world.board(2).uuid
    assert found.instances == (
        Instance("MIG-1", uuid, 9, 0, "1g.10gb", 9856 * mib),
        Instance("MIG-2", uuid, 2, 0, "1c.3g.40gb", 40320 * mib),
        Instance("MIG-3", uuid, 2, 1, "2c.3g.40gb", 40320 * mib),
        Instance("MIG-4", uuid, 7, 0, None, 10 * GIB),
    )
    assert found.instances[2].legacy_name == f"MIG-{uuid}/2/1"
    assert found.driver == "580.1"
    as_boards = [found.device(name) for name in ("MIG-1", "MIG-4", uuid)]
    assert [board.name for board in as_boards] == [
        "NVIDIA H100 MIG 1g.10gb",
        "NVIDIA H100 MIG",
        "NVIDIA H100",
    ]
    assert {board.pci_bus_id for board in as_boards} == {world.board(2).pci_bus_id}


def test_a_host_without_a_driver_has_an_empty_inventory(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world).nvmlShutdown()
    world.set_init_result(DRIVER_NOT_LOADED)
    assert read_inventory() == Inventory(
        driver_missing="NVML: Driver Not Loaded; load the NVIDIA kernel module"
    )


def test_nvml_is_left_as_it_was(tmp_path: Path, nvml_attach: Attach) -> None:
    nvml = nvml_attach(World(tmp_path / "world", [Board()]))
    read_inventory()
    read_answering()
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()
    assert len(read_inventory().boards) == 1


def test_memory_in_use_and_mig_mode_are_listed_for_each_board(tmp_path: Path, nvml_attach: Attach) -> None:
    parts = (MigInstance("MIG-1", memory_used=3 * GIB),)
    given = [
        Board(uuid="GPU-a", memory_used=5 * GIB, memory_reserved=GIB, mig_capable=False),
        Board(uuid="GPU-b", mig_enabled=True, mig_instances=parts),
        Board(uuid="GPU-c", mig_enabled=True),
    ]
    nvml_attach(World(tmp_path / "world", given))
    found = read_inventory()
    assert found.mig_enabled == {"GPU-b", "GPU-c"}
    assert (found.used_bytes["GPU-a"], found.used_bytes["MIG-1"]) == (5 * GIB, 3 * GIB)


def test_an_old_driver_reports_memory_in_one_number(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "world", [Board(memory_used=5 * GIB, memory_reserved=GIB)])
    nvml = nvml_attach(world)
    # A version that the driver has not heard of, as the second is to those before 510.
    monkeypatch.setattr(nvml, "nvmlMemory_v2", 0x09000028)
    assert read_used_bytes(nvml, world.board(0).uuid) == 6 * GIB
    assert read_used_bytes(nvml, "GPU-none") is None
