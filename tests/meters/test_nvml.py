# SPDX-License-Identifier: Apache-2.0
"""The energy counter of NVIDIA boards, by UUID, and every way of not having one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.nvml import NvmlMeter, open_nvml
from pytest_llenergy.meters.protocol import Targets

from ..nvml_sim import Board, World

Attach = Callable[[World], ModuleType]
DRIVER_NOT_LOADED = 9

OPEN = """
import ctypes
from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.nvml import NvmlMeter
try:
    ctypes.CDLL("libnvidia-ml.so.1")
    print("library", end=": ")
except OSError:
    pass
try:
    NvmlMeter(["GPU-a"])
except MeterError as error:
    print(error)
"""


def test_meters_by_uuid_read_their_own_board(tmp_path: Path, nvml_attach: Attach) -> None:
    boards = (Board(name="Slow", power_w=50.0, latch_ns=0), Board(name="Fast", power_w=600.0, latch_ns=0))
    world = World(tmp_path / "world", boards)
    nvml_attach(world)
    slow, fast = world.board(0).uuid, world.board(1).uuid
    meter = NvmlMeter([fast, slow])
    assert [domain.name for domain in meter.domains] == [f"gpu:{fast}", f"gpu:{slow}"]
    begin_ns = time.monotonic_ns()
    first = meter.read()
    time.sleep(0.1)
    second = meter.read()
    end_ns = time.monotonic_ns()
    meter.close()
    for index, watts, before, after in zip((1, 0), (600, 50), first, second, strict=True):
        assert isinstance(before, float)
        assert isinstance(after, float)
        assert watts * 0.1 - 0.01 <= after - before <= world.true_energy_j(index, begin_ns, end_ns) + 0.01


def test_limits_are_those_of_the_board_sensor(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board()])
    nvml_attach(world)
    meter = NvmlMeter([world.board(0).uuid])
    meter.close()
    (domain,) = meter.domains
    assert domain.limits(100.0, 1.0) == pytest.approx((95, 105))
    info = domain.info(meter.name)
    assert (info.name, info.kind, info.scope, info.update_period_s) == ("nvml", "measured", "board", None)


def test_a_board_without_a_counter_is_named(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(), Board(energy_supported=False)])
    nvml_attach(world)
    have, lack = world.board(0).uuid, world.board(1).uuid
    with pytest.raises(MeterError, match=rf"^nvml: no energy counter on {lack} \(Not Supported\)$"):
        NvmlMeter([have, lack])
    with pytest.raises(MeterError, match=r"^nvml: no energy counter on GPU-none \(Not Found\)$"):
        NvmlMeter(["GPU-none"])


def test_a_failed_open_leaves_nvml_as_it_was(tmp_path: Path, nvml_attach: Attach) -> None:
    nvml = nvml_attach(World(tmp_path / "world", [Board(energy_supported=False)]))
    with pytest.raises(MeterError):
        NvmlMeter(["GPU-none"])
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()


def test_a_lost_board_gives_a_reason_and_the_other_its_value(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(), Board()])
    nvml_attach(world)
    meter = NvmlMeter([world.board(0).uuid, world.board(1).uuid])
    world.update(0, lost=True)
    lost, alive = meter.read()
    meter.close()
    assert lost == "nvml: GPU is lost"
    assert isinstance(alive, float)


def test_a_test_without_gpus_is_not_for_nvml() -> None:
    with pytest.raises(MeterError, match=r"^nvml: the test uses no GPU$"):
        open_nvml(Targets())


def opened(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_without_the_library_there_is_no_meter() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    said = opened(bare)
    if said.startswith("library"):
        pytest.skip("this host has an NVIDIA driver")
    assert said == "nvml: NVML Shared Library Not Found"


def test_without_a_driver_there_is_no_meter(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board()], init_result=DRIVER_NOT_LOADED)
    said = opened({**os.environ, **world.environment(nvml_library.parent)})
    assert said == "library: nvml: Driver Not Loaded"
