# SPDX-License-Identifier: Apache-2.0
"""hwmon sensors on directory trees like those of the kernel."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.hwmon import HwmonMeter, open_hwmon
from pytest_llenergy.energy.sampler import MeterReader
from pytest_llenergy.errors import MeterError


def chip(root: Path, directory: str, name: str, **files: str | int) -> Path:
    path = root / directory
    path.mkdir(parents=True)
    for file, content in {"name": name, **files}.items():
        (path / file).write_text(f"{content}\n")
    return path


def opened(root: Path, argument: str) -> HwmonMeter:
    (meter,) = open_hwmon(Targets(), argument, root)
    return meter


def refusal(root: Path, argument: str) -> str:
    with pytest.raises(MeterError) as caught:
        open_hwmon(Targets(), argument, root)
    return str(caught.value)


def test_an_energy_counter_is_read_in_microjoules(tmp_path: Path) -> None:
    path = chip(tmp_path, "hwmon0", "amd_energy", energy1_input=5_000_000, energy1_label="Esocket0")
    meter = opened(tmp_path, "amd_energy/Esocket0")
    assert meter.read() == [5.0]
    (path / "energy1_input").write_text("7500000\n")
    assert meter.read() == [7.5]
    (domain,) = meter.domains
    meter.close()
    assert (domain.name, domain.source) == ("hwmon:amd_energy/Esocket0", "hwmon energy1_input")
    assert domain.resolution_j == 1e-6
    assert [flag.name for flag in domain.flags] == ["meter"]


def test_power_in_microwatts_is_integrated_over_time(tmp_path: Path) -> None:
    chip(tmp_path, "hwmon0", "ina238", power1_input=20_000_000)
    before_s = time.monotonic()
    meter = opened(tmp_path, "ina238")
    assert meter.read() == [0.0]
    first_s = time.monotonic()
    time.sleep(0.2)
    second_s = time.monotonic()
    (energy_j,) = meter.read()
    meter.close()
    assert isinstance(energy_j, float)
    assert second_s - first_s <= energy_j / 20 <= time.monotonic() - before_s


def test_intervals_that_the_chip_reports_are_used(tmp_path: Path) -> None:
    chip(
        tmp_path,
        "hwmon0",
        "power_meter",
        power1_average=1_000_000,
        power1_average_interval=1500,
        update_interval=250,
    )
    meter = opened(tmp_path, "power_meter@2%")
    (domain,) = meter.domains
    meter.close()
    assert (domain.smear_s, domain.update_period_s) == (1.5, 0.25)
    assert domain.source == "hwmon power1_average integrated"
    assert domain.limits(50.0, 1.0) == pytest.approx((49, 51))
    assert domain.flags == ()


def test_intervals_that_the_chip_does_not_report_are_flagged(tmp_path: Path) -> None:
    chip(tmp_path, "hwmon0", "amdgpu", power1_average=1_000_000)
    meter = opened(tmp_path, "amdgpu@2%")
    (domain,) = meter.domains
    meter.close()
    assert [(flag.name, flag.severity) for flag in domain.flags] == [("meter", "warning")]


def test_instantaneous_power_is_preferred_to_the_average(tmp_path: Path) -> None:
    chip(tmp_path, "hwmon0", "amdgpu", power1_average=1, power1_input=1, power1_cap=1)
    meter = opened(tmp_path, "amdgpu")
    meter.close()
    assert meter.domains[0].source == "hwmon power1_input integrated"


@pytest.mark.parametrize("argument", ["ina/CPU", "ina/power2", "hwmon3/CPU"])
def test_a_sensor_is_found_by_label_or_channel(tmp_path: Path, argument: str) -> None:
    chip(tmp_path, "hwmon3", "ina", power1_input=1, power2_input=2, power2_label="CPU")
    meter = opened(tmp_path, argument)
    meter.close()
    assert meter.domains[0].name == "hwmon:ina/CPU"


def test_one_of_several_sensors_must_be_chosen(tmp_path: Path) -> None:
    assert refusal(tmp_path, "ina") == f"hwmon: no sensor 'ina' under {tmp_path}; found: none"
    chip(tmp_path, "hwmon0", "ina", power1_input=1, power2_input=2, power2_label="CPU")
    for directory in ("hwmon1", "hwmon2"):
        chip(tmp_path, directory, "amdgpu", power1_average=1)
    ina, amd = (
        "hwmon:hwmon0/power1 (ina), hwmon:hwmon0/CPU (ina)",
        "hwmon:hwmon1/power1 (amdgpu), hwmon:hwmon2/power1 (amdgpu)",
    )
    assert refusal(tmp_path, "ina") == f"hwmon: several sensors are called 'ina'; found: {ina}"
    assert refusal(tmp_path, "amdgpu") == f"hwmon: several sensors are called 'amdgpu'; found: {amd}"
    assert refusal(tmp_path, "ina/GPU") == f"hwmon: no sensor 'ina/GPU' under {tmp_path}; found: {ina}, {amd}"
    assert refusal(tmp_path, "ina/CPU@sum=2") == "hwmon: ina/CPU is one sensor; leave out @sum=2"
    opened(tmp_path, "hwmon2").close()


def test_an_invalid_sensor_is_refused_and_its_file_closed(tmp_path: Path) -> None:
    path = chip(tmp_path, "hwmon0", "ina", power1_input="many")
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert refusal(tmp_path, "ina") == (
        f"hwmon: {path}/power1_input reads 'many', which is not a power in µW up to 20000 W"
    )
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


#: Negative power, too much power, all ones, a truncated number, words, other notations, nothing.
NO_POWER = ("-1", "-5000000", "20000000001", str(2**64 - 1), "9" * 40, "nan", "1e6", "1_000", "20.5", "")


@pytest.mark.parametrize("content", NO_POWER)
def test_an_impossible_power_is_refused(tmp_path: Path, content: str) -> None:
    path = chip(tmp_path, "hwmon0", "ina", power1_input=content)
    assert refusal(tmp_path, "ina") == (
        f"hwmon: {path}/power1_input reads {content[:32]!r}, which is not a power in µW up to 20000 W"
    )


@pytest.mark.parametrize("content", [0, "fast", "-250", ""])
def test_an_impossible_interval_counts_as_unknown(tmp_path: Path, content: str | int) -> None:
    chip(tmp_path, "hwmon0", "ina238", power1_input=1_000_000, update_interval=content)
    meter = opened(tmp_path, "ina238@1%")
    meter.close()
    (domain,) = meter.domains
    assert domain.late_s == (0.0, 2.0)
    assert [flag.detail for flag in domain.flags] == [
        "ina238 does not report how often power1 is refreshed, and it changed too seldom to show it while it "
        "was watched; its joules may lag by up to 2 s"
    ]


def test_an_unreported_refresh_period_is_found_by_observation(tmp_path: Path) -> None:
    chip(tmp_path, "hwmon0", "amdgpu", power1_input="1000000")
    stop = threading.Event()

    def refresh() -> None:
        with (tmp_path / "hwmon0" / "power1_input").open("r+b", buffering=0) as file:
            for watts in itertools.cycle(range(1, 9)):
                # One write of constant length, so that no reader sees a partial value.
                os.pwrite(file.fileno(), b"%d000000\n" % watts, 0)
                if stop.wait(0.05):
                    return

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        meter = opened(tmp_path, "amdgpu@1%")
    finally:
        stop.set()
        thread.join()
    meter.close()
    (domain,) = meter.domains
    assert domain.update_period_s == pytest.approx(0.05, rel=0.2)
    # The sensor may report a mean or the instantaneous value.
    assert domain.late_s == (domain.late_s[1] / 2, domain.update_period_s)
    assert domain.flags == ()


def test_an_unreadable_sensor_is_refused(tmp_path: Path) -> None:
    path = chip(tmp_path, "hwmon0", "ina")
    (path / "power1_input").mkdir()
    assert refusal(tmp_path, "ina") == f"hwmon: {path}/power1_input cannot be read (Is a directory)"


def test_a_counter_that_returns_long_after_it_fell_gives_a_reason(tmp_path: Path) -> None:
    path = chip(tmp_path, "hwmon0", "amd_energy", energy1_input=5_000_000_000_000)
    reader = MeterReader(opened(tmp_path, "amd_energy"))
    (series,) = reader.series
    for joules in (5_000_000, 5_000_001, 0, *range(1, 14), 5_000_015, 5_000_016):
        with (path / "energy1_input").open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"%020d\n" % (joules * 10**6), 0)
        reader.read()
        time.sleep(0.1)
    reader.meter.close()
    assert series.ticks[-1].energy_j - series.ticks[0].energy_j <= 16
    assert len(series.outages) == 2
