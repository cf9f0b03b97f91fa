# SPDX-License-Identifier: Apache-2.0
"""The description of a board."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from validation import machine

from ..nvml_sim import Board, World

Attach = Callable[[World], ModuleType]


def test_description_lists_available_and_refused_quantities(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "world", [Board(name="NVIDIA Sim 7", unsupported_fields=(186,))])
    nvml_attach(world)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    uuid, _ = machine.first_gpu()
    assert uuid == world.board(0).uuid
    found = machine.describe_gpu(uuid)
    assert (found.name, found.driver, found.driver_cuda) == ("NVIDIA Sim 7", "580.95.05", "13.0")
    assert found.power_limit_w == 700
    assert found.compute_capability == "9.0"
    assert found.clocks_mhz["sm_max"] == 1980
    assert "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION" in found.sources
    assert "NVML_FI_DEV_POWER_AVERAGE" in found.sources
    assert "Not Supported" in found.refused["NVML_FI_DEV_POWER_INSTANT"]


def test_hidden_board_is_not_used(
    tmp_path: Path, nvml_attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml_attach(World(tmp_path / "world", [Board()]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.first_gpu()[0] is None
    assert machine.nvml_missing()
