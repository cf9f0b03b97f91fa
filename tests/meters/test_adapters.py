# SPDX-License-Identifier: Apache-2.0
"""Meters backed by other packages. These are extras; without them one clear line says what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.meters import amd, zeus
from pytest_llenergy.meters import codecarbon as codecarbon_model
from pytest_llenergy.meters.base import MeterSpec, Targets
from tests.meters import amd_sim

SPECS = [amd.SPEC, zeus.SPEC, codecarbon_model.SPEC]
PACKAGES = {"amd": "amdsmi", "zeus": "zeus.device.soc", "codecarbon": "codecarbon"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_missing_package_gives_the_command_that_installs_it(
    spec: MeterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[spec.name], None)
    with pytest.raises(MeterError) as caught:
        spec.open(Targets())
    package = PACKAGES[spec.name].split(".")[0]
    assert str(caught.value) == (
        f"{spec.name}: {package} is missing; pip install 'pytest-llenergy[{spec.name}]'"
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_these_meters_are_used_only_if_named(spec: MeterSpec) -> None:
    assert not spec.by_default


# AMD: the real package over a stand-in for its library.

OPEN_AMD = """
import sys
from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.amd import open_amd
from pytest_llenergy.meters.base import Targets
try:
    meters = open_amd(Targets(tuple(sys.argv[1:])))
    for meter in meters:
        (domain,), (first,), (second,) = meter.domains, meter.read(), meter.read()
        print(domain.name, round(domain.resolution_j * 1e6, 2), round(second - first, 3))
        print(*(f"{flag.name}: {flag.detail}" for flag in domain.flags), sep="\\n")
        meter.close()
except MeterError as error:
    print(error)
"""


def open_amd(rocm: Path, *uuids: str) -> list[str]:
    """Open the boards in a new process and return the lines that it prints."""
    environment = {**os.environ, "ROCM_PATH": str(rocm)}
    environment.pop("ROCM_HOME", None)
    command = [sys.executable, "-c", OPEN_AMD, *uuids]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    wrapper = package("amdsmi") / "amdsmi_wrapper.py"
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return amd_sim.build(tmp_path, wrapper)


def test_the_inventory_lists_amd_boards(rocm: Path) -> None:
    environment = {**os.environ, "ROCM_PATH": str(rocm)}
    environment.pop("ROCM_HOME", None)
    script = "from pytest_llenergy.devices.amd import list_boards\nprint(*list_boards(), sep='\\n')"
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        "shut down",
        "AmdBoard(uuid='moves', name='AMD Instinct MI300X', pci_bus_id='0000:c1:00.0', "
        "memory_bytes=206141652992, memory_used_bytes=314572800, power_limit_w=750.0, processes=(4711,))",
        "AmdBoard(uuid='stands', name=None, pci_bus_id='0000:c2:00.0', memory_bytes=None, "
        "memory_used_bytes=None, power_limit_w=None, processes=())",
    ]


def test_amd_energy_is_the_count_times_its_resolution(rocm: Path) -> None:
    measured, accuracy, end = open_amd(rocm, "moves")
    assert measured == "gpu:moves 15.3 1.53"
    assert accuracy.startswith("accuracy-unknown: ")
    assert end == "shut down"


def test_without_targets_moving_amd_counters_are_read_and_others_are_flagged(rocm: Path) -> None:
    measured, _, still, _ = open_amd(rocm)
    assert measured == "gpu:moves 15.3 1.53"
    assert still == (
        "unmoving: no energy counter moves on stands: not in the energy, or in that of the other die"
    )


def test_an_amd_board_whose_counter_stands_still_is_refused(rocm: Path) -> None:
    assert open_amd(rocm, "stands") == [
        "shut down",
        "amd: the energy counter of stands stood still for 0.5 s",
    ]


def test_an_unknown_amd_board_is_refused(rocm: Path) -> None:
    assert open_amd(rocm, "GPU-a") == ["shut down", "amd: no board GPU-a; found: moves, stands"]


def test_a_missing_amd_library_names_what_to_install(tmp_path: Path) -> None:
    package("amdsmi")
    (message,) = open_amd(tmp_path)
    assert message == (
        "amd: amdsmi cannot load libamd_smi.so ('libamd_smi.so'); "
        "install amd-smi-lib of the same ROCm release"
    )


# Zeus


class Chip:
    """A stand-in for what ``zeus.device.soc.get_soc`` returns on Apple silicon and Jetson."""

    def __init__(self, **millijoules: float | list[float] | None) -> None:
        self.now = SimpleNamespace(**millijoules)

    def get_total_energy_consumption(self) -> SimpleNamespace:
        return self.now


def test_apple_silicon_parts_are_counted_once_and_marked_estimated() -> None:
    chip = Chip(cpu_total_mj=5000, efficiency_cluster_mj=[2000], gpu_mj=250, gpu_sram_mj=None, dram_mj=30)
    meter = zeus.ZeusSocMeter(chip)
    assert [domain.name for domain in meter.domains] == ["soc:cpu", "soc:gpu", "soc:dram"]
    assert {domain.kind for domain in meter.domains} == {"estimated"}
    assert meter.read() == pytest.approx([5.0, 0.25, 0.03])


def test_jetson_rails_are_not_added_to_their_total() -> None:
    chip = Chip(cpu_energy_mj=1000.0, gpu_energy_mj=2000.0, total_energy_mj=7000.0)
    meter = zeus.ZeusSocMeter(chip)
    (domain,) = meter.domains
    assert (domain.name, domain.kind, domain.max_age_s) == ("soc:total", "measured", 0.1)
    assert meter.read() == [7.0]


def test_a_jetson_without_a_total_uses_its_rails() -> None:
    meter = zeus.ZeusSocMeter(Chip(cpu_energy_mj=1.0, gpu_energy_mj=2.0, total_energy_mj=None))
    assert [domain.name for domain in meter.domains] == ["soc:cpu", "soc:gpu"]


def test_a_part_that_vanishes_gives_a_reason() -> None:
    chip = Chip(total_energy_mj=7000.0)
    meter = zeus.ZeusSocMeter(chip)
    chip.now = SimpleNamespace(total_energy_mj=None)
    assert meter.read() == ["zeus: total_energy_mj is missing"]


def test_a_chip_without_energy_fields_is_refused() -> None:
    with pytest.raises(MeterError, match=r"^zeus: SimpleNamespace has no known energy field$"):
        zeus.ZeusSocMeter(Chip())


def test_the_field_names_exist_in_zeus() -> None:
    apple = pytest.importorskip("zeus.device.soc.apple")
    jetson = pytest.importorskip("zeus.device.soc.jetson")
    for parts, measurement in (
        (zeus.APPLE, apple.AppleSiliconMeasurement),
        ((*zeus.JETSON_TOTAL, *zeus.JETSON_RAILS), jetson.JetsonMeasurement),
    ):
        assert {part.field for part in parts} <= {field.name for field in fields(measurement)}


def test_chips_that_zeus_refuses_give_its_reason() -> None:
    soc = pytest.importorskip("zeus.device.soc")
    try:
        soc.get_soc()
    except soc.ZeusSoCInitError as error:
        refused = str(error)
    else:
        pytest.skip("this is such a chip")
    with pytest.raises(MeterError) as caught:
        zeus.open_zeus(Targets())
    assert str(caught.value) == f"zeus: {refused} It reads Apple silicon and Jetson."


# CodeCarbon


def test_codecarbon_does_not_apply_to_gpus() -> None:
    with pytest.raises(MeterDoesNotApply, match=r"^codecarbon: models the CPU only"):
        codecarbon_model.open_codecarbon(Targets(("GPU-a",)))


@pytest.fixture
def codecarbon() -> Callable[[], Any]:
    pytest.importorskip("codecarbon")
    return lambda: codecarbon_model.open_codecarbon(Targets())[0]


def test_codecarbon_is_marked_estimated(codecarbon: Callable[[], Any]) -> None:
    (domain,) = codecarbon().domains
    assert (domain.name, domain.kind, domain.scope) == ("cpu:codecarbon", "estimated", "host processors")
    assert [flag.name for flag in domain.flags] == ["accuracy-unknown"]


def test_codecarbon_energy_lies_within_its_stated_limits(codecarbon: Callable[[], Any]) -> None:
    start_s = time.monotonic()
    meter = codecarbon()
    opened_s = time.monotonic()
    assert meter.read() == [0.0]
    time.sleep(codecarbon_model.SAMPLE_S)
    read_s = time.monotonic()
    (energy_j,) = meter.read()
    lowest_j, _ = meter.domains[0].limits(energy_j, read_s - opened_s)
    _, highest_j = meter.domains[0].limits(energy_j, time.monotonic() - start_s)
    assert 0 < lowest_j <= energy_j <= highest_j
