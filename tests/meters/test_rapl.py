# SPDX-License-Identifier: Apache-2.0
"""RAPL on trees that look like those of the kernel: what is counted, wrap-around, refusals."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.protocol import Targets
from pytest_llenergy.meters.rapl import RaplMeter, open_rapl

RANGE_UJ = 262_143_328_850
NOBODY = 65534


def zone(root: Path, directory: str, name: str, energy_uj: int = 1_000_000) -> Path:
    path = root / directory
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return path


def server(root: Path) -> dict[str, Path]:
    """Two sockets with memory, a die with cores and graphics, the platform, and the memory-mapped mirrors."""
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "uncore",
        "intel-rapl:0:2": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:1:0": "dram",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
        "intel-rapl-mmio:0:0": "dram",
    }
    (root / "intel-rapl").mkdir()
    return {directory: zone(root, directory, name) for directory, name in zones.items()}


def test_packages_and_their_memory_are_counted_and_nothing_twice(tmp_path: Path) -> None:
    zones = server(tmp_path)
    meter = RaplMeter(tmp_path)
    assert [(domain.name, domain.scope) for domain in meter.domains] == [
        ("cpu:package-0", "package"),
        ("dram:package-0", "memory"),
        ("cpu:package-1", "package"),
        ("dram:package-1", "memory"),
    ]
    steps = {"intel-rapl:0": 5, "intel-rapl:0:2": 7, "intel-rapl:1": 11, "intel-rapl:1:0": 13}
    for directory, path in zones.items():
        step = steps.get(directory, 1000)
        (path / "energy_uj").write_text(f"{1_000_000 + step * 1_000_000}\n")
    assert meter.read() == [5.0, 7.0, 11.0, 13.0]
    meter.close()


def test_a_wrap_is_computed_from_the_two_readings(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 2_000_000) / "energy_uj"
    meter = RaplMeter(tmp_path)
    assert meter.read() == [0.0]
    path.write_text("3000000\n")
    assert meter.read() == [pytest.approx(5.0)]
    path.write_text("4000000\n")
    assert meter.read() == [pytest.approx(6.0)]
    path.write_text("3999999\n")
    assert meter.read() == [pytest.approx(6.0 + RANGE_UJ / 1e6 - 1e-6)]
    meter.close()


def test_a_counter_that_cannot_be_read_any_more_gives_a_reason(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0") / "energy_uj"
    meter = RaplMeter(tmp_path)
    path.write_text("")
    (value,) = meter.read()
    meter.close()
    assert isinstance(value, str)
    assert value.startswith("rapl: cpu:package-0 cannot be read (")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything, so it steps down for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_without_permission_the_remedy_is_told() -> None:
    # Not tmp_path, whose parents other users may not enter.
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        counter = zone(root, "intel-rapl:0", "package-0") / "energy_uj"
        counter.chmod(0 if os.geteuid() != 0 else 0o400)
        with unprivileged(), pytest.raises(MeterError) as caught:
            RaplMeter(root)
    assert str(caught.value) == (
        f"rapl: no permission to read {counter}; sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
    )


@pytest.mark.parametrize("directories", [[], ["intel-rapl"]])
def test_without_a_package_there_is_no_meter(tmp_path: Path, directories: list[str]) -> None:
    root = tmp_path / "powercap"
    for directory in directories:
        (root / directory).mkdir(parents=True)
    with pytest.raises(MeterError, match=rf"^rapl: no package counter under {root}$"):
        RaplMeter(root)


def test_a_zone_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (zone(tmp_path, "intel-rapl:0", "package-0") / "energy_uj").write_text("many\n")
    with pytest.raises(MeterError, match=r"^rapl: invalid literal"):
        RaplMeter(tmp_path)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    zones = server(tmp_path)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    RaplMeter(tmp_path).close()
    (zones["intel-rapl:1:0"] / "energy_uj").write_text("many\n")
    with pytest.raises(MeterError):
        RaplMeter(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_test_of_gpus_is_not_for_rapl() -> None:
    with pytest.raises(MeterError, match=r"^rapl: the test uses GPUs"):
        open_rapl(Targets(("GPU-a",)))
