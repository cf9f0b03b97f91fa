# SPDX-License-Identifier: Apache-2.0
"""RAPL counters through Linux perf events: the ``power`` device, which keeps them in 64 bits.

Each event is counted on one CPU of each package (``cpumask``). Its count times its ``.scale`` is joules
(kernel: arch/x86/events/rapl.c), and the kernel follows the 32-bit register over its wrap-around.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import MeterError
from pytest_llenergy.model.record import Flag

ROOT = Path("/")
DEVICE = Path("sys/bus/event_source/devices/power")
TOPOLOGY = Path("sys/devices/system/cpu")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")

#: What an event covers. energy-cores, energy-gpu and energy-psys overlap these.
PREFIXES = {"energy-pkg": "cpu", "energy-ram": "dram"}

#: Numbers of perf_event_open (kernel: arch/x86/entry/syscalls/syscall_64.tbl, asm-generic/unistd.h).
SYSCALLS = {"x86_64": 298, "aarch64": 241}
CLOSE_ON_EXEC = 8
#: struct perf_event_attr as first published (PERF_ATTR_SIZE_VER0): type, size, config, the rest zero.
ATTRIBUTE_BYTES = 64

#: Vendors with one register for the whole socket, however many dies the kernel lists
#: (kernel: Documentation/hwmon/amd_energy.rst; kernels before 6.12 count it on each die).
ONE_REGISTER_A_SOCKET = ("AuthenticAMD", "HygonGenuine")


@dataclass(frozen=True)
class Event:
    """An event of the device: type and config for the kernel, and the joules of one count."""

    name: str
    type: int
    config: int
    scale_j: float


class PerfCounter:
    """One open event on one CPU. Perf shows no power limit."""

    limit_w: float | None = None

    def __init__(self, event: Event, cpu: int, domain: str) -> None:
        """Open the event.

        Raises:
            OSError: If the kernel refuses.
        """
        self.domain = domain
        self._scale_j = event.scale_j
        self._descriptor = perf_event_open(event.type, event.config, cpu)

    def energy_j(self) -> float:
        """Return joules since the event was opened.

        Raises:
            OSError: If there is no count.
        """
        count = os.read(self._descriptor, 8)
        if len(count) != 8:
            raise OSError("the event has no count any more; was its CPU taken offline?")
        return int.from_bytes(count, sys.byteorder) * self._scale_j

    def close(self) -> None:
        """Release the event."""
        os.close(self._descriptor)


def perf_event_open(event_type: int, config: int, cpu: int) -> int:
    """Open a descriptor that counts an event of all processes on a CPU.

    Args:
        event_type: Type of the event.
        config: Its configuration.
        cpu: Number of the CPU.

    Raises:
        OSError: If the kernel refuses.
    """
    number = SYSCALLS.get(platform.machine())
    if number is None or sys.platform != "linux":
        raise OSError(f"no perf events on {sys.platform} {platform.machine()}")
    attribute = struct.pack("=IIQ", event_type, ATTRIBUTE_BYTES, config).ljust(ATTRIBUTE_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(number, attribute, -1, cpu, -1, ctypes.c_ulong(CLOSE_ON_EXEC)))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def open_events(root: Path = ROOT) -> tuple[list[PerfCounter], list[Flag]]:
    """Open the counters of every package and its memory. Returns them with flags for those left out.

    Raises:
        MeterError: If the device has no package event or the kernel refuses.
    """
    device = root / DEVICE
    counters: list[PerfCounter] = []
    try:
        if not (device / "events" / "energy-pkg").exists():
            raise MeterError(f"no energy-pkg event under {device}")
        packages, flags = _packages(root, cpu_list((device / "cpumask").read_text()))
        for cpu, package in packages:
            for event in _events(device):
                counters.append(_open(event, cpu, f"{PREFIXES[event.name]}:{package}"))
    except (OSError, ValueError, MeterError) as error:
        for counter in counters:
            counter.close()
        raise MeterError(str(error)) from None
    return counters, flags


def _open(event: Event, cpu: int, domain: str) -> PerfCounter:
    try:
        return PerfCounter(event, cpu, domain)
    except OSError as error:
        allow = ""
        if isinstance(error, PermissionError):
            level = PARANOID.read_text().strip() if PARANOID.exists() else "unknown"
            allow = f" (needs CAP_PERFMON or kernel.perf_event_paranoid <= 0, which is {level})"
        reason = error.strerror or error
        raise MeterError(f"perf_event_open of power/{event.name}/ on CPU {cpu}: {reason}{allow}") from None


def _events(device: Path) -> Iterator[Event]:
    event_type = int((device / "type").read_text())
    for name in PREFIXES:
        path = device / "events" / name
        if path.exists():
            scale_j = float(path.with_name(f"{name}.scale").read_text())
            unit = path.with_name(f"{name}.unit").read_text().strip()
            if unit != "Joules":
                raise ValueError(f"{path}.unit is {unit!r}, not 'Joules'")
            yield Event(name, event_type, _config(device, path.read_text()), scale_j)


def _config(device: Path, terms: str) -> int:
    """Parse the terms of an event: ``event=0x02`` with the format ``config:0-7`` is 2."""
    config = 0
    for term in terms.strip().split(","):
        name, _, value = term.partition("=")
        field, _, bits = (device / "format" / name).read_text().strip().partition(":")
        if field != "config":
            raise ValueError(f"{device / 'format' / name} is {field!r}, not 'config'")
        config |= int(value, 0) << int(bits.split("-")[0])
    return config


def _packages(root: Path, cpus: list[int]) -> tuple[list[tuple[int, str]], list[Flag]]:
    """Return one CPU and the name for each counter: of a die, or of the socket where its dies share one."""
    places = [
        (cpu, _topology(root, cpu, "physical_package_id"), _topology(root, cpu, "die_id")) for cpu in cpus
    ]
    sockets = [package for _, package, _ in places]
    shared = any(vendor in (root / "proc/cpuinfo").read_text() for vendor in ONE_REGISTER_A_SOCKET)
    cpu_by_name: dict[str, int] = {}
    flags: list[Flag] = []
    for cpu, package, die in places:
        name = f"package-{package}"
        if not shared and sockets.count(package) > 1:
            name = f"{name}-die-{die}"
        if name in cpu_by_name:
            other = cpu_by_name[name]
            detail = f"CPU {cpu} shows the same counter as CPU {other} (cpu:{name}) and is not counted"
            flags.append(Flag(name="mirror", severity="note", detail=detail))
        else:
            cpu_by_name[name] = cpu
    return [(cpu, name) for name, cpu in cpu_by_name.items()], flags


def _topology(root: Path, cpu: int, name: str) -> int:
    path = root / TOPOLOGY / f"cpu{cpu}" / "topology" / name
    return int(path.read_text()) if path.exists() else 0


def cpu_list(text: str) -> list[int]:
    """Parse a list of CPUs: ``0-1,18`` is 0, 1 and 18."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
