# SPDX-License-Identifier: Apache-2.0
"""``llenergy doctor``: what is here, what is not, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.meters import powercap, rapl

from .meters.unprivileged import open_directory, unprivileged
from .nvml_sim import Board, World


def test_it_comes_to_its_end_and_names_every_meter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for line in (
        "meter    estimate for cpu: estimated, cpu:host by CPU time",
        "meter    hwmon: by name only, --energy-meter=hwmon:ARGUMENT",
        "meter    command: by name only, --energy-meter=command:ARGUMENT",
        "backend  transformers: available",
    ):
        assert line in text


def test_a_board_is_told_with_its_counter(tmp_path: Path, nvml_library: Path) -> None:
    world = World(tmp_path / "world", [Board(name="NVIDIA H100 80GB HBM3", sensor_window_ns=25_000_000)])
    environment = {**os.environ, **world.environment(nvml_library.parent)}
    result = subprocess.run(
        [sys.executable, "-m", "pytest_llenergy.cli", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    uuid = world.board(0).uuid
    assert f"gpu 0    NVIDIA H100 80GB HBM3 {uuid}" in result.stdout
    assert (
        f"meter    nvml for {uuid}: measured, gpu:{uuid} by NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, every "
    ) in result.stdout
    assert "sees 25% of the time" in result.stdout


def test_counters_that_may_not_be_read_come_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_directory() as root:
        zone = root / "intel-rapl:0"
        zone.mkdir()
        for name, text in (("name", "package-0"), ("max_energy_range_uj", "1000000"), ("energy_uj", "5")):
            (zone / name).write_text(text + "\n")
        (zone / "energy_uj").chmod(0o600)
        defaults = {**(rapl.open_rapl.__kwdefaults__ or {}), "powercap_root": root, "system_root": root}
        monkeypatch.setattr(rapl.open_rapl, "__kwdefaults__", defaults)
        assert root != powercap.ROOT
        with unprivileged():
            assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("meter    rapl"))
    assert line.startswith(f"meter    rapl for cpu: no (rapl: no permission to read {zone}/energy_uj; ")
    assert line.endswith(f"{rapl.REMEDY})")
