# SPDX-License-Identifier: Apache-2.0
"""What a process of its own reads of the GPUs, through stand-ins for NVML's library and AMD's module."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.environment import collect_environment
from pytest_llenergy.devices.inventory import Instance, Inventory, find_gpus, read_inventory
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.visibility import list_settings, visible_variables
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
    found = read_inventory()
    assert [(board.name, board.memory_bytes, board.power_limit_w) for board in found.boards] == [
        ("NVIDIA L4", 24 * GIB, 72.0),
        ("NVIDIA H100", 80 * GIB, 700.0),
    ]
    made = [world.board(index) for index in range(2)]
    assert [(each.uuid, each.pci_bus_id) for each in found.boards] == [
        (each.uuid, each.pci_bus_id) for each in made
    ]
    assert found.driver == "580.1"


def test_a_driver_that_refuses_is_not_a_host_without_gpus(tmp_path: Path, nvml_attach: Attach) -> None:
    """Else a test with fallback="cpu" would run there, for a reason that is not the real one."""
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world)
    world.set_init_result(NO_PERMISSION)
    refused = "NVML: Insufficient Permissions; see nvidia-smi"
    with pytest.raises(DeviceError, match=f"^{refused}$"):
        select_devices(GpuRequest(1, fallback="cpu"), environment={})
    assert find_gpus() == Inventory(error=refused)
    assert collect_environment().gpus_missing == [refused]


def test_boards_that_answer_are_listed_despite_others_that_do_not(
    tmp_path: Path, nvml_attach: Attach
) -> None:
    world = World(tmp_path / "world", [Board(lost=True), Board(), Board(no_permission=True), Board()])
    nvml_attach(world)
    found = read_inventory()
    assert found.uuids == (world.board(1).uuid, world.board(3).uuid)
    assert [found.index(uuid) for uuid in found.uuids] == [1, 3]
    assert found.faults == [
        "NVML: GPU 0 does not answer (GPU is lost); see nvidia-smi",
        "NVML: GPU 2 does not answer (Insufficient Permissions); see nvidia-smi",
    ]


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
    ]
    world = World(tmp_path / "world", given)
    nvml_attach(world)
    found, uuid = read_inventory(), world.board(2).uuid
    assert found.instances == (
        Instance("MIG-1", uuid, "1g.10gb", 9856 * mib),
        Instance("MIG-2", uuid, "1c.3g.40gb", 40320 * mib),
        Instance("MIG-3", uuid, "2c.3g.40gb", 40320 * mib),
        Instance("MIG-4", uuid, None, 10 * GIB),
    )
    as_boards = [found.device(name) for name in ("MIG-1", "MIG-4", uuid)]
    assert [board.name for board in as_boards] == [
        "NVIDIA H100 MIG 1g.10gb",
        "NVIDIA H100 MIG",
        "NVIDIA H100",
    ]
    assert {board.pci_bus_id for board in as_boards} == {world.board(2).pci_bus_id}


def test_a_host_without_a_driver_has_an_empty_inventory(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world)
    world.set_init_result(DRIVER_NOT_LOADED)
    assert read_inventory() == Inventory(
        driver_missing="NVML: Driver Not Loaded; load the NVIDIA kernel module"
    )


def test_nothing_is_imported_from_the_project_and_a_failure_is_told_in_its_words(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_attach(World(tmp_path / "world", [Board()]))
    for name in ("json", "ctypes", "warnings", "pynvml"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('no such luck')\n")
    monkeypatch.chdir(tmp_path)
    assert len(read_inventory().boards) == 1
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    find_gpus.cache_clear()
    assert find_gpus().error == (
        "the process that queries the GPU driver failed: RuntimeError: no such luck; see llenergy doctor"
    )


AMDSMI = """
class AmdSmiException(Exception): pass
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return [0, 1, 2]
def amdsmi_get_gpu_asic_info(handle):
    print("a library that prints")
    return {"market_name": "AMD Instinct MI300X", "asic_serial": ["0xA1B2", "0x2", "N/A"][handle]}
def amdsmi_get_gpu_device_bdf(handle): return f"0000:c{handle}:00.0"
def amdsmi_get_gpu_vram_usage(handle): return {"vram_total": 196592, "vram_used": 300}
def amdsmi_get_power_cap_info(handle):
    if handle: raise AmdSmiException("not supported\\n in a virtual machine")
    return {"power_cap": 750_000_000}
"""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the module of a host with three AMD boards, one of which answers otherwise."""
    module = tmp_path / "amd" / "amdsmi.py"
    module.parent.mkdir()
    module.write_text(AMDSMI)
    monkeypatch.syspath_prepend(module.parent)
    monkeypatch.setenv("PYTHONPATH", str(module.parent), prepend=os.pathsep)
    return module


A, B = "GPU-000000000000a1b2", "GPU-0000000000000002"


def test_amd_boards_are_found_and_leased(amd: Path) -> None:
    found = read_inventory()
    assert [(board.uuid, board.memory_bytes, board.power_limit_w) for board in found.boards] == [
        (A, 196592 << 20, 750.0),
        (B, 196592 << 20, None),
    ]
    assert found.boards[0].name == "AMD Instinct MI300X"
    (fault,) = found.faults
    assert fault.startswith("AMD SMI: GPU 2 does not answer as expected (ValueError: ")
    assert select_devices(GpuRequest(1, name="MI300X", memory="190 GiB"), environment={}).uuids == (A,)


@pytest.mark.parametrize(
    ("environment", "leased"),
    [
        ({"ROCR_VISIBLE_DEVICES": B}, (B,)),
        ({"HIP_VISIBLE_DEVICES": "1"}, (B,)),
        ({"ROCR_VISIBLE_DEVICES": f"{B},{A}", "HIP_VISIBLE_DEVICES": "1"}, (A,)),
        ({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, (B,)),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, ()),
    ],
)
def test_each_variable_of_rocm_counts_what_the_one_before_has_left(
    amd: Path, environment: dict[str, str], leased: tuple[str, ...]
) -> None:
    amd.write_text(AMDSMI.replace("[0, 1, 2]", "[0, 1]"))
    if leased:
        assert select_devices(GpuRequest(1), environment=environment).uuids == leased
        return
    with pytest.raises(DeviceError) as caught:
        select_devices(GpuRequest(1), environment=environment)
    assert "ROCR_VISIBLE_DEVICES='1', HIP_VISIBLE_DEVICES='1': '1' does not match" in str(caught.value)


def test_a_rank_on_amd_boards_sees_them_alone(amd: Path) -> None:
    variables = visible_variables((B, A))
    assert variables["ROCR_VISIBLE_DEVICES"] == f"{B},{A}"
    assert list_settings(variables, read_inventory()) == variables
    assert select_devices(GpuRequest(2), environment=variables).uuids == (B, A)


def test_another_release_of_amdsmi_is_one_line(amd: Path) -> None:
    amd.write_text(AMDSMI.replace("def amdsmi_init(): pass", "def amdsmi_start(): pass"))
    (fault,) = find_gpus().faults
    assert fault == "AMD SMI: module 'amdsmi' has no attribute 'amdsmi_init'; see amd-smi list"
