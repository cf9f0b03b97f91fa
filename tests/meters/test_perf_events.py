# SPDX-License-Identifier: Apache-2.0
"""Perf events on device trees like the kernel's, and the system call on a counter that every kernel has.

``cpu-clock`` counts nanoseconds (type 1, event 0). Given a scale of 1e-9 it is a package of one watt.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.base import Targets
from pytest_llenergy.meters.perf_events import PerfCounter, cpu_list, open_events, perf_event_open
from pytest_llenergy.meters.rapl import open_rapl
from tests.meters.unprivileged import open_directory, unprivileged

SOFTWARE = 1
#: No such PMU: the kernel refuses it before it checks permissions.
UNKNOWN = 4_000_000


def make_device(
    root: Path, *, cpus: dict[int, tuple[int, int]], vendor: str = "GenuineIntel", pmu: int = SOFTWARE
) -> Path:
    """Create a ``power`` device; ``cpus`` maps each CPU to its (package, die)."""
    path = root / "sys/bus/event_source/devices/power"
    (path / "events").mkdir(parents=True)
    (path / "format").mkdir()
    (path / "type").write_text(f"{pmu}\n")
    (path / "cpumask").write_text(",".join(map(str, cpus)) + "\n")
    (path / "format" / "event").write_text("config:0-7\n")
    add_event(path, "energy-pkg", 0)
    for cpu, (package, die) in cpus.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "die_id").write_text(f"{die}\n")
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    return path


def add_event(path: Path, name: str, number: int) -> None:
    (path / "events" / name).write_text(f"event={number:#04x}\n")
    (path / "events" / f"{name}.scale").write_text("1e-9\n")
    (path / "events" / f"{name}.unit").write_text("Joules\n")


class FakeSystemCall:
    """Replaces the system call, because the CPUs of these device trees need not exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int, int]] = []
        monkeypatch.setattr("pytest_llenergy.meters.perf_events.perf_event_open", self)

    def __call__(self, event_type: int, config: int, cpu: int) -> int:
        self.calls.append((event_type, config, cpu))
        return os.open(os.devnull, os.O_RDONLY)


def close_and_name(counters: list[PerfCounter]) -> list[str]:
    for counter in counters:
        counter.close()
    return [counter.domain for counter in counters]


@pytest.mark.parametrize(
    ("text", "cpus"), [("0\n", [0]), ("0,18\n", [0, 18]), ("0-1,4-6", [0, 1, 4, 5, 6]), ("\n", [])]
)
def test_cpu_masks_are_parsed(text: str, cpus: list[int]) -> None:
    assert cpu_list(text) == cpus


def test_each_package_and_its_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_device(tmp_path, cpus={0: (0, 0), 18: (1, 0)}, pmu=9)
    for number, name in enumerate(
        ("energy-cores", "energy-pkg", "energy-ram", "energy-gpu", "energy-psys"), 1
    ):
        add_event(path, name, number)
    opened = FakeSystemCall(monkeypatch)
    counters, flags = open_events(tmp_path)
    assert close_and_name(counters) == ["cpu:package-0", "dram:package-0", "cpu:package-1", "dram:package-1"]
    assert opened.calls == [(9, 2, 0), (9, 3, 0), (9, 2, 18), (9, 3, 18)]
    assert flags == []


def test_dies_of_a_package_are_counted_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_device(tmp_path, cpus={0: (0, 0), 8: (0, 1)})
    FakeSystemCall(monkeypatch)
    counters, flags = open_events(tmp_path)
    assert close_and_name(counters) == ["cpu:package-0-die-0", "cpu:package-0-die-1"]
    assert flags == []


def test_amd_dies_share_the_counter_of_their_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_device(tmp_path, cpus={0: (0, 0), 8: (0, 1), 16: (1, 0)}, vendor="AuthenticAMD")
    FakeSystemCall(monkeypatch)
    counters, (flag,) = open_events(tmp_path)
    assert close_and_name(counters) == ["cpu:package-0", "cpu:package-1"]
    assert flag.detail == "CPU 8 shows the same counter as CPU 0 (cpu:package-0) and is not counted"


def test_event_fields_are_placed_by_the_format_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_device(tmp_path, cpus={0: (0, 0)})
    (path / "format" / "umask").write_text("config:8-15\n")
    (path / "events" / "energy-pkg").write_text("event=0x02,umask=0x01\n")
    opened = FakeSystemCall(monkeypatch)
    close_and_name(open_events(tmp_path)[0])
    assert opened.calls == [(SOFTWARE, 0x102, 0)]


def test_a_unit_other_than_joules_is_refused(tmp_path: Path) -> None:
    path = make_device(tmp_path, cpus={0: (0, 0)})
    (path / "events" / "energy-pkg.unit").write_text("Calories\n")
    with pytest.raises(MeterError, match=r"energy-pkg.unit is 'Calories', not 'Joules'$"):
        open_events(tmp_path)


def test_a_device_without_a_package_event_is_refused(tmp_path: Path) -> None:
    path = make_device(tmp_path, cpus={0: (0, 0)})
    (path / "events" / "energy-pkg").unlink()
    with pytest.raises(MeterError) as caught:
        open_events(tmp_path)
    assert str(caught.value) == f"no energy-pkg event under {path}"


@pytest.fixture
def whole_cpus() -> None:
    """Skip unless the kernel and the container allow this user to count whole CPUs."""
    try:
        os.close(perf_event_open(SOFTWARE, 0, 0))
    except PermissionError as error:
        pytest.skip(f"counting a whole CPU is not permitted ({error})")


@pytest.mark.usefixtures("whole_cpus")
def test_a_real_event_is_opened_read_and_scaled(tmp_path: Path) -> None:
    make_device(tmp_path, cpus={0: (0, 0)})
    (meter,) = open_rapl(Targets(), powercap_root=tmp_path, system_root=tmp_path)
    (domain,) = meter.domains
    (before,) = meter.read()
    (after,) = meter.read()
    meter.close()
    assert (domain.name, domain.kind) == ("cpu:package-0", "measured")
    assert domain.source == "perf_event_open power/energy-pkg/, power/energy-ram/"
    assert isinstance(before, float)
    assert isinstance(after, float)
    # The counter counts nanoseconds; unscaled, the values would be millions.
    assert 0 < before < after < 3600


def test_an_event_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    make_device(tmp_path, cpus={0: (0, 0)}, pmu=UNKNOWN)
    with pytest.raises(MeterError) as caught:
        open_rapl(Targets(), powercap_root=tmp_path, system_root=tmp_path)
    assert str(caught.value) == (
        f"rapl: no package counter under {tmp_path}; "
        "perf_event_open of power/energy-pkg/ on CPU 0: No such file or directory"
    )


def test_missing_permission_names_the_capability_and_the_sysctl() -> None:
    level = Path("/proc/sys/kernel/perf_event_paranoid").read_text().strip()
    if int(level) <= 0:
        pytest.skip("this kernel lets everybody count whole CPUs")
    with open_directory() as root:
        make_device(root, cpus={0: (0, 0)})
        with unprivileged(), pytest.raises(MeterError) as caught:
            open_events(root)
    # A container's seccomp filter returns EPERM where the kernel returns EACCES.
    denied, remedy = str(caught.value).split(" (", 1)
    assert denied in [
        f"perf_event_open of power/energy-pkg/ on CPU 0: {os.strerror(code)}"
        for code in (errno.EACCES, errno.EPERM)
    ]
    assert remedy == f"needs CAP_PERFMON or kernel.perf_event_paranoid <= 0, which is {level})"


@pytest.mark.usefixtures("whole_cpus")
def test_no_file_descriptor_is_left_open_when_a_later_cpu_is_refused(tmp_path: Path) -> None:
    make_device(tmp_path, cpus={0: (0, 0), 100_000: (1, 0)})
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(MeterError, match="on CPU 100000: "):
        open_events(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
