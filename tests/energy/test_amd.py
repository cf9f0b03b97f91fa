# SPDX-License-Identifier: Apache-2.0
"""AMD boards: the real package over a stand-in for its library."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llenergy.energy.meters import amd
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.errors import MeterError
from tests.energy import amd_sim


def test_a_missing_package_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(MeterError, match=r"^amd: amdsmi is missing; pip install 'pytest-llenergy\[amd\]'$"):
        amd.SPEC.open(Targets())


def test_the_meter_is_used_only_if_named() -> None:
    assert not amd.SPEC.by_default


OPEN_AMD = """
import sys
from pytest_llenergy.errors import MeterError
from pytest_llenergy.energy.meters.amd import open_amd
from pytest_llenergy.energy.meters.base import Targets
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
    script = "from pytest_llenergy.devices.inventory import find_gpus\nprint(find_gpus())"
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert (
        "Board(uuid='GPU-000000000000a1b2', name='AMD Instinct MI300X', pci_bus_id='0000:c1:00.0', "
        "memory_bytes=206141652992, power_limit_w=750.0)"
    ) in run.stdout
    assert "AMD SMI: GPU 1 does not answer as expected" in run.stdout


def test_a_leased_amd_board_is_measured(rocm: Path) -> None:
    assert open_amd(rocm, "GPU-000000000000a1b2")[0] == "gpu:GPU-000000000000a1b2 15.3 1.53"


def test_amd_energy_is_the_count_times_its_resolution(rocm: Path) -> None:
    measured, accuracy, end = open_amd(rocm, "moves")
    assert measured == "gpu:moves 15.3 1.53"
    assert accuracy.startswith("meter: ")
    assert end == "shut down"


def test_without_targets_every_amd_board_is_read(rocm: Path) -> None:
    measured, _, still, *_ = open_amd(rocm)
    assert (measured, still) == ("gpu:moves 15.3 1.53", "gpu:stands 15.3 0.0")


def test_an_unknown_amd_board_is_refused(rocm: Path) -> None:
    assert open_amd(rocm, "GPU-a") == ["shut down", "amd: no board GPU-a; found: moves, stands"]


def test_a_missing_amd_library_names_what_to_install(tmp_path: Path) -> None:
    package("amdsmi")
    (message,) = open_amd(tmp_path)
    assert message == (
        "amd: amdsmi cannot load libamd_smi.so ('libamd_smi.so'); "
        "install amd-smi-lib of the same ROCm release"
    )
