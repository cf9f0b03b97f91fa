# SPDX-License-Identifier: Apache-2.0
"""RAPL on directory trees like those of the kernel: what is counted, wraps, mirrors, refusals."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.rapl import RaplMeter, open_rapl
from pytest_llenergy.energy.sampler import MeterReader
from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from tests.energy.unprivileged import open_directory, privileged, unprivileged

RANGE_UJ = 262_143_328_850
JOULE = 1_000_000
MS = 1_000_000

#: Two sockets with memory, cores and graphics of one die, the platform, and the memory-mapped mirrors.
SERVER = {
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


class Machine:
    """A powercap tree whose counters advance by a joule at each pause."""

    def __init__(self, root: Path, zones: dict[str, str]) -> None:
        self.root = root
        for index, (directory, name) in enumerate(zones.items()):
            (root / directory).mkdir(parents=True)
            (root / directory / "name").write_text(f"{name}\n")
            (root / directory / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            self.set(directory, (index + 1) * 1000 * JOULE)
        self.moving = list(zones)

    def counter(self, zone: str) -> Path:
        return self.root / zone / "energy_uj"

    def get(self, zone: str) -> int:
        return int(self.counter(zone).read_text())

    def set(self, zone: str, energy_uj: int) -> None:
        # One write to the open file, so that a reader never finds it empty.
        with self.counter(zone).open("r+" if self.counter(zone).exists() else "w") as file:
            file.write(f"{energy_uj}\n".ljust(32))

    def add(self, zone: str, joules: float) -> None:
        self.set(zone, (self.get(zone) + round(joules * JOULE)) % RANGE_UJ)

    def pause(self, _seconds: float) -> None:
        for zone in self.moving:
            self.add(zone, 1)

    def open(self, still_s: float = 60) -> RaplMeter:
        (meter,) = open_rapl(
            Targets(),
            powercap_root=self.root,
            still_s=still_s,
            pause=self.pause,
        )
        return meter


Build = Callable[[dict[str, str]], Machine]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return lambda zones: Machine(tmp_path, zones)


def joules(values: Sequence[float | str]) -> list[float]:
    assert all(isinstance(value, float) for value in values), values
    return [float(value) for value in values]


def names(meter: RaplMeter) -> list[str]:
    return [domain.name for domain in meter.domains]


def test_packages_and_their_memory_are_counted_once(build: Build) -> None:
    machine = build(SERVER)
    meter = machine.open()
    assert [(domain.name, domain.scope) for domain in meter.domains] == [
        ("cpu:package-0", "package"),
        ("dram:package-0", "memory"),
        ("cpu:package-1", "package"),
        ("dram:package-1", "memory"),
    ]
    before = joules(meter.read())
    steps = {"intel-rapl:0": 5, "intel-rapl:0:2": 7, "intel-rapl:1": 11, "intel-rapl:1:0": 13}
    for zone in SERVER:
        machine.add(zone, steps.get(zone, 1000))
    after = joules(meter.read())
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([5, 7, 11, 13])
    assert {domain.source for domain in meter.domains} == {"powercap intel-rapl energy_uj"}
    assert not any(domain.flags for domain in meter.domains)
    meter.close()


def test_zones_with_a_disabled_power_limit_are_counted(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    (machine.root / "intel-rapl:0" / "enabled").write_text("0\n")
    meter = machine.open()
    (before,) = joules(meter.read())
    machine.add("intel-rapl:0", 3)
    assert joules(meter.read()) == [pytest.approx(before + 3)]
    meter.close()


def test_a_counter_wrap_adds_the_counter_range(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    machine.set("intel-rapl:0", RANGE_UJ - 2 * JOULE)
    machine.moving = []
    machine.pause = lambda _seconds: machine.set("intel-rapl:0", RANGE_UJ - JOULE)  # type: ignore[method-assign]
    meter = machine.open()
    (before,) = joules(meter.read())
    time.sleep(0.005)
    machine.set("intel-rapl:0", 3 * JOULE)
    assert joules(meter.read()) == [pytest.approx(before + 4)]
    machine.set("intel-rapl:0", 4 * JOULE)
    assert joules(meter.read()) == [pytest.approx(before + 5)]
    meter.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.76, 0.95])
def test_a_reset_from_anywhere_in_its_range_is_no_wrap(build: Build, share: float) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    machine.set("intel-rapl:0", round(share * RANGE_UJ))
    reader = MeterReader(machine.open())
    (series,) = reader.series
    resets_at = 5
    for number in range(10):
        time.sleep(0.002)
        if number == resets_at:
            machine.set("intel-rapl:0", 0)
        machine.add("intel-rapl:0", 0.1)
        reader.read()
        if number == resets_at:
            reset_ns = time.monotonic_ns()
    reader.meter.close()
    reason = series.reason_between(reset_ns, reset_ns + MS)
    assert (reason or "").startswith("rapl: the counter of cpu:package-0 went backwards, from ")
    # The reading with the reset counts nothing; the others count a tenth of a joule each.
    assert series.ticks[-1].energy_j - series.ticks[0].energy_j == pytest.approx(0.8)


def test_a_power_limit_is_no_physical_ceiling(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    zone = machine.root / "intel-rapl:0"
    (zone / "enabled").write_text("1\n")
    (zone / "constraint_0_name").write_text("short_term\n")
    (zone / "constraint_0_power_limit_uw").write_text("10000000\n")
    reader = MeterReader(machine.open())
    (series,) = reader.series
    for _ in range(5):
        time.sleep(0.01)
        machine.add("intel-rapl:0", 2)
        reader.read()
    reader.meter.close()
    assert series.outages == []


def test_a_jump_beyond_the_limit_of_a_package_gives_a_reason(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    reader = MeterReader(machine.open())
    (series,) = reader.series
    reader.read()
    machine.add("intel-rapl:0", 50_000)
    reader.read()
    reader.meter.close()
    ((_, _, reason),) = series.outages
    assert "jumped by 50000.000 J" in reason
    assert reason.endswith("of a device that may draw 2000 W")


@pytest.mark.parametrize(("vendor", "counted"), [("GenuineIntel", 2), ("AuthenticAMD", 1)])
def test_dies_of_an_amd_package_are_counted_once(
    build: Build, tmp_path: Path, vendor: str, counted: int
) -> None:
    dies = ["package-0-die-0", "package-0-die-1"]
    machine = build({"intel-rapl:0": dies[0], "intel-rapl:1": dies[1]})
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    (tmp_path / "stat").write_text("cpu 1 0 1\n")
    (meter,) = open_rapl(
        Targets(), powercap_root=machine.root, proc=tmp_path, still_s=60, pause=machine.pause
    )
    assert names(meter) == [f"cpu:{die}" for die in dies[:counted]]
    assert [(flag.name, flag.severity, flag.detail) for flag in meter.domains[0].flags] == [
        (
            "meter",
            "note",
            "cpu:package-0-die-1 (intel-rapl:1) repeats the counter of intel-rapl:0 and is not counted",
        )
    ] * (2 - counted)
    meter.close()


def test_two_zones_with_the_same_name_are_one_package(build: Build) -> None:
    meter = build({"intel-rapl:0": "package-0", "intel-rapl:1": "package-0"}).open()
    assert names(meter) == ["cpu:package-0"]
    meter.close()


def test_memory_whose_counter_stands_still_is_left_out_and_flagged(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram"})
    machine.moving = ["intel-rapl:0"]
    meter = machine.open()
    assert names(meter) == ["cpu:package-0"]
    assert [(flag.name, flag.severity, flag.detail) for flag in meter.domains[0].flags] == [
        ("meter", "warning", "the counter of dram:package-0 stands still; it is not in the energy")
    ]
    meter.close()


def test_a_package_whose_counter_stands_still_gives_a_reason(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0", "intel-rapl:1": "package-1"})
    machine.moving = ["intel-rapl:0"]
    meter = machine.open(still_s=0.001)
    time.sleep(0.002)
    machine.pause(0)
    moving, still = meter.read()
    meter.close()
    assert isinstance(moving, float)
    assert isinstance(still, str)
    assert still.startswith("rapl: the counter of cpu:package-1 has stood still for ")


def test_a_counter_that_stops_while_it_is_read_gives_a_reason(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    meter = machine.open(still_s=0.001)
    time.sleep(0.002)
    (value,) = meter.read()
    meter.close()
    assert isinstance(value, str)
    assert value.startswith("rapl: the counter of cpu:package-0 has stood still for ")


def test_without_a_moving_package_counter_the_meter_is_refused(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram"})
    machine.moving = ["intel-rapl:0:0"]
    with pytest.raises(MeterError) as caught:
        machine.open(still_s=0.1)
    assert str(caught.value) == "rapl: no package counter moves (cpu:package-0 stood still for 0.1 s)"


def test_a_counter_that_becomes_unreadable_gives_a_reason(build: Build) -> None:
    machine = build({"intel-rapl:0": "package-0"})
    meter = machine.open()
    machine.counter("intel-rapl:0").write_text("")
    (value,) = meter.read()
    meter.close()
    assert isinstance(value, str)
    assert value.startswith("rapl: cpu:package-0 cannot be read (")


def test_missing_permission_names_the_file_and_a_permanent_remedy() -> None:
    with open_directory() as root:
        counter = Machine(root, {"intel-rapl:0": "package-0"}).counter("intel-rapl:0")
        counter.chmod(0 if os.geteuid() != 0 else 0o400)
        with unprivileged(), pytest.raises(MeterError) as caught:
            open_rapl(Targets(), powercap_root=root)
    assert str(caught.value) == (
        f"rapl: no permission to read {counter}; "
        """echo 'ACTION=="add", SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", """
        """RUN+="/bin/chmod a+r /sys%p/energy_uj /sys%p/max_energy_range_uj"' """
        """| sudo tee /etc/udev/rules.d/70-rapl.rules """
        """&& sudo udevadm control -R && sudo udevadm trigger -c add -s powercap"""
    )


@pytest.mark.parametrize("closed", ["energy_uj", "max_energy_range_uj"])
def test_memory_that_cannot_be_read_is_left_out_with_a_remedy_that_works(closed: str) -> None:
    with open_directory() as root:
        machine = Machine(root, {"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram"})
        (root / "intel-rapl:0:0" / closed).chmod(0)
        # Root may write counters that the meter may not read.
        pause = privileged(machine.pause)
        with unprivileged():
            (meter,) = open_rapl(Targets(), powercap_root=root, still_s=60, pause=pause)
            meter.close()
        assert names(meter) == ["cpu:package-0"]
        (flag,) = meter.domains[0].flags
        assert flag.severity == "warning"
        begin = f"dram:package-0 is not in the energy: no permission to read {root}/intel-rapl:0:0/{closed}; "
        assert flag.detail.startswith(begin)
        for zone in ("intel-rapl:0", "intel-rapl:0:0"):
            command = flag.detail.split('RUN+="')[1].split('"')[0]
            subprocess.run(shlex.split(command.replace("/sys%p", str(root / zone))), check=True)
        with unprivileged():
            (meter,) = open_rapl(Targets(), powercap_root=root, still_s=60, pause=pause)
            meter.close()
        assert names(meter) == ["cpu:package-0", "dram:package-0"]


def test_memory_is_known_within_a_factor(build: Build) -> None:
    """0.94 to 1.65 times what an external meter showed, on a Broadwell server."""
    meter = build({"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram"}).open()
    meter.close()
    package, memory = meter.domains
    assert package.limits(100.0, 1.0) == pytest.approx((95, 105))
    low_j, high_j = memory.limits(100.0, 1.0)
    for ratio in (0.94, 1.65):
        assert low_j <= 100 / ratio <= high_j
    assert memory.accuracy == "assumed within a factor of 1.65"


def test_zones_hidden_by_a_container_engine_are_reported_as_hidden(tmp_path: Path) -> None:
    # Container engines mount an empty directory over the target of the links.
    (tmp_path / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl/intel-rapl:0")
    with pytest.raises(MeterError, match=r"intel-rapl:0/name does not exist; container runtimes hide it$"):
        open_rapl(Targets(), powercap_root=tmp_path)


def test_no_file_descriptor_is_left_open(build: Build) -> None:
    machine = build(SERVER | {"intel-rapl:3": "package-1", "intel-rapl:3:0": "dram"})
    machine.moving.remove("intel-rapl:0:2")
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    meter = machine.open()
    # What stands still is already closed.
    assert [flag.name for flag in meter.domains[0].flags] == ["meter", "meter"]
    meter.close()
    machine.moving = []
    with pytest.raises(MeterError, match="no package counter moves"):
        machine.open()
    machine.counter("intel-rapl:1").write_text("many\n")
    with pytest.raises(MeterError, match="invalid literal"):
        machine.open()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_rapl_does_not_apply_to_tests_of_gpus() -> None:
    with pytest.raises(MeterDoesNotApply, match=r"^rapl: the test uses GPUs"):
        open_rapl(Targets(("GPU-a",)))
