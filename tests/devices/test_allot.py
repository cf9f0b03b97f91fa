# SPDX-License-Identifier: Apache-2.0
"""From a request to devices, over the real NVML of a machine with three boards of two models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allot import GpuRequest, allot
from pytest_llenergy.devices.visibility import VARIABLE
from pytest_llenergy.errors import DeviceError

from ..nvml_sim import Board, World

Attach = Callable[[World], ModuleType]
DRIVER_NOT_LOADED = 9


@pytest.fixture
def uuids(tmp_path: Path, nvml_attach: Attach) -> list[str]:
    boards = (Board(name="NVIDIA L4"), Board(name="NVIDIA H100"), Board(name="NVIDIA H100"))
    world = World(tmp_path / "world", boards)
    nvml_attach(world)
    return [world.board(index).uuid for index in range(3)]


def test_without_a_request_a_test_has_the_cpu() -> None:
    lease = allot(None)
    assert (lease.devices, lease.uuids, lease.fallback, lease.visible_devices) == (("cpu",), (), None, "")


def test_boards_are_taken_in_the_order_of_the_environment(uuids: list[str]) -> None:
    assert allot(GpuRequest(2), environment={}).uuids == tuple(uuids[:2])
    lease = allot(GpuRequest(2), environment={VARIABLE: "2,0,1"})
    assert lease.uuids == lease.devices == (uuids[2], uuids[0])
    assert lease.indices == (2, 0)
    assert lease.names == ("NVIDIA H100", "NVIDIA L4")
    assert lease.visible_devices == f"{uuids[2]},{uuids[0]}"
    assert lease.fallback is None


@pytest.mark.parametrize("value", ["", "-1"])
def test_an_environment_that_allows_none_is_obeyed_and_named(uuids: list[str], value: str) -> None:
    with pytest.raises(DeviceError) as caught:
        allot(GpuRequest(2), environment={VARIABLE: value})
    assert str(caught.value) == (
        f"gpus(2): the environment sets CUDA_VISIBLE_DEVICES={value!r}, which allows no GPU; the driver "
        "shows 3; --energy-gpus=all overrides it on purpose"
    )


@pytest.mark.parametrize(("selection", "chosen"), [("all", (0, 1)), ("2,1", (2, 1))])
def test_a_selection_overrides_the_environment(
    uuids: list[str], selection: str, chosen: tuple[int, ...]
) -> None:
    lease = allot(GpuRequest(2), selection, {VARIABLE: ""})
    assert lease.indices == chosen
    assert lease.uuids == tuple(uuids[index] for index in chosen)


def test_a_selection_by_uuid(uuids: list[str]) -> None:
    assert allot(GpuRequest(1), uuids[2], {VARIABLE: "0"}).indices == (2,)
    with pytest.raises(DeviceError, match="'GPU-f00d' names no single GPU"):
        allot(GpuRequest(1), "GPU-f00d", {})


def test_a_name_is_part_of_the_product_name(uuids: list[str]) -> None:
    assert allot(GpuRequest(2, name="h100"), environment={}).indices == (1, 2)
    with pytest.raises(DeviceError, match=r"^gpus\(2\): only 1 named 'L4' of 3 GPUs may be used here$"):
        allot(GpuRequest(2, name="L4"), environment={})


def test_too_few(uuids: list[str]) -> None:
    with pytest.raises(DeviceError, match=r"^gpus\(4\): only 3 of 3 GPUs may be used here$"):
        allot(GpuRequest(4), environment={})
    with pytest.raises(DeviceError, match=r"^gpus\(2\): only 1 of 3 GPUs may be used here$"):
        allot(GpuRequest(2), environment={VARIABLE: "1"})


def test_cpu_ranks_only_where_the_test_allows_them(uuids: list[str]) -> None:
    lease = allot(GpuRequest(4, fallback="cpu"), environment={VARIABLE: ""})
    assert (lease.devices, lease.fallback, lease.uuids) == (("cpu",) * 4, "cpu", ())
    assert allot(GpuRequest(3, fallback="cpu"), environment={}).fallback is None


def test_the_environment_is_read_when_asked(uuids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert allot(GpuRequest(1)).indices == (1,)


def test_without_a_driver(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board()], init_result=DRIVER_NOT_LOADED)
    code = (
        "from pytest_llenergy.devices.allot import *\n"
        "try: allot(GpuRequest(1), environment={})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print(allot(GpuRequest(2, fallback='cpu'), environment={}).devices)"
    )
    merged = {**os.environ, **world.environment(nvml_library.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "DeviceError gpus(1): this host has no NVIDIA GPU (NVML shows none)",
        "('cpu', 'cpu')",
    ]
