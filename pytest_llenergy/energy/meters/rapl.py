# SPDX-License-Identifier: Apache-2.0
"""CPU packages and memory: the RAPL counters (running average power limit) of Intel and AMD processors.

``enabled`` of a powercap zone is about its power *limit* (kernel:
drivers/powercap/intel_rapl_common.c, ``get_domain_enable``). Zones whose limit is off, or locked by the
firmware, count all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_llenergy import real_time
from pytest_llenergy.energy.attribution import MEMORY_RATIO, PACKAGE_RATIO
from pytest_llenergy.energy.cpu_time import PROC, explain_hidden_host
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, within
from pytest_llenergy.energy.timeouts import RAPL_STILL_S
from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.record.record import Flag

ROOT = Path("/sys/class/powercap")

#: Vendors whose dies all show the counter of their package (Linux, drivers/powercap/intel_rapl_common.c: "Fix
#: the energy-pkg event for AMD CPUs"). Those of Intel have counters of their own.
ONE_COUNTER_VENDORS = ("AuthenticAMD", "HygonGenuine")

#: Highest power of a package or its memory (W). Processors are specified for 500 W at most (Intel Xeon 6900,
#: AMD EPYC 9005); this leaves room for later ones. The limits in powercap are settings, which may be lower.
HIGHEST_W = 2000.0

#: A udev rule, since permissions of files in /sys are lost at reboot.
REMEDY = (
    """echo 'ACTION=="add", SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", """
    """RUN+="/bin/chmod a+r /sys%p/energy_uj /sys%p/max_energy_range_uj"' """
    """| sudo tee /etc/udev/rules.d/70-rapl.rules """
    """&& sudo udevadm control -R && sudo udevadm trigger -c add -s powercap"""
)

#: Vendors publish no accuracy. ±5 % is assumed for packages. The memory of a Broadwell server differed from
#: an external meter by up to this factor.
GAIN_LIMIT, MEMORY_FACTOR = 0.05, 1.65

#: The counters are updated about every millisecond (kernel: Documentation/hwmon/amd_energy; Intel SDM vol.
#: 3B, 15.10.1), but not exactly, so a reading may be somewhat older.
UPDATE_PERIOD_S = 0.001
MAX_AGE_S = 0.002

#: Steps of 61 µJ, the coarsest usual unit of the registers (Intel SDM: 2^-14 J; AMD: 2^-16 J).
RESOLUTION_J = 2**-14


class Zone:
    """One powercap counter, kept open and followed over wrap-around.

    The registers have 32 bits and wrap after 65 to 262 kJ (units of 15 or 61 µJ), a minute or more at a
    kilowatt. A counter that went back has wrapped only if it can have counted the rest of its range since the
    previous reading. Otherwise its joules go back too, as after a reset.
    """

    def __init__(self, directory: Path, domain: str) -> None:
        self.domain = domain
        self.moved = False
        self._range_uj = int((directory / "max_energy_range_uj").read_text())
        self._descriptor = os.open(directory / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._last_uj = self._read_uj()
        except BaseException:
            self.close()
            raise
        self._read_s = self._moved_s = real_time.monotonic()
        self._total_uj = 0

    def _read_uj(self) -> int:
        return int(os.pread(self._descriptor, 32, 0))

    def read(self, still_s: float) -> float | str:
        """Return joules since the zone was opened, or why there are none: it stood still for so long, say."""
        try:
            now_uj, now_s = self._read_uj(), real_time.monotonic()
        except (OSError, ValueError) as error:
            return f"rapl: {self.domain} cannot be read ({error})"
        step_uj = now_uj - self._last_uj
        if step_uj < 0 and step_uj + self._range_uj <= HIGHEST_W * (now_s - self._read_s + MAX_AGE_S) * 1e6:
            step_uj += self._range_uj
        self._last_uj, self._read_s = now_uj, now_s
        self._total_uj += step_uj
        if step_uj:
            self._moved_s, self.moved = now_s, True
        elif now_s - self._moved_s > still_s:
            return f"rapl: the counter of {self.domain} has stood still for {now_s - self._moved_s:.1f} s"
        return self._total_uj / 1e6

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._descriptor)


def open_zones(root: Path = ROOT, proc: Path = PROC) -> tuple[list[Zone], list[Flag]]:
    """Open the zones of packages and their memory. Returns them with flags for those left out.

    Other zones are not opened: cores and graphics are part of the package, psys contains everything, and
    intel-rapl-mmio repeats the packages.

    Raises:
        MeterError: No package can be read.
    """
    zones: list[Zone] = []
    flags: list[Flag] = []
    counters: dict[str, str] = {}
    vendors = (proc / "cpuinfo").read_text() if (proc / "cpuinfo").exists() else ""
    one_counter = any(each in vendors for each in ONE_COUNTER_VENDORS)
    try:
        for package in sorted(root.glob("intel-rapl:[0-9]*")):
            name = (package / "name").read_text().strip()
            if package.name.count(":") > 1 or not name.startswith("package"):
                continue
            first = counters.setdefault(name.partition("-die-")[0] if one_counter else name, package.name)
            if first != package.name:
                detail = f"cpu:{name} ({package.name}) repeats the counter of {first} and is not counted"
                flags.append(Flag(name="meter", severity="note", detail=detail))
                continue
            zones.append(Zone(package, f"cpu:{name}"))
            for part in sorted(root.glob(f"{package.name}:[0-9]*")):
                if (part / "name").read_text().strip() == "dram":
                    _add_memory(zones, flags, part, f"dram:{name}")
    except (OSError, ValueError) as error:
        _close(zones)
        raise MeterError(f"rapl: {_explain(error)}") from None
    if not zones:
        raise MeterError(f"rapl: no package counter under {root}")
    return zones, flags


def _explain(error: OSError | ValueError) -> str:
    """Return why a zone cannot be opened, and what to do."""
    if isinstance(error, PermissionError):
        return f"no permission to read {error.filename}; {REMEDY}"
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} does not exist; container runtimes hide it"
    return str(error)


def _add_memory(zones: list[Zone], flags: list[Flag], directory: Path, domain: str) -> None:
    """Add the memory of a package, which is measured without it if it cannot be read."""
    try:
        zones.append(Zone(directory, domain))
    except (OSError, ValueError) as error:
        detail = f"{domain} is not in the energy: {_explain(error)}"
        flags.append(Flag(name="meter", severity="warning", detail=detail))


class RaplMeter:
    """CPU packages and their memory."""

    name = "rapl"
    poll_period_s: float = 0.01

    def __init__(
        self, zones: Sequence[Zone], flags: Sequence[Flag], still_s: float, unsplit: str | None = None
    ) -> None:
        """Take open zones over. ``unsplit`` is why the energy of others cannot be told, if it cannot."""
        self._zones, self._still_s = zones, still_s
        notes = list(flags)
        if unsplit:
            detail = f"all energy of the processors is counted, whoever used them: {unsplit}"
            notes.append(Flag(name="meter", severity="warning", detail=detail))
        self.domains: tuple[Domain, ...] = tuple(
            _domain(zone, () if index else tuple(notes), splits=not unsplit)
            for index, zone in enumerate(zones)
        )

    def read(self) -> list[float | str]:
        return [zone.read(self._still_s) for zone in self._zones]

    def close(self) -> None:
        _close(self._zones)


def _select_moving(
    zones: Sequence[Zone], flags: list[Flag], still_s: float, pause: Callable[[float], None]
) -> list[Zone]:
    """Leave out memory whose counter stands still, with a flag; a package gives a reason when it is read.

    Raises:
        MeterError: If no counter of a package moves.
    """
    for _ in range(round(RAPL_STILL_S / UPDATE_PERIOD_S)):
        pause(UPDATE_PERIOD_S)
        for zone in zones:
            zone.read(still_s)
        if all(zone.moved for zone in zones):
            break
    packages = [zone for zone in zones if zone.domain.startswith("cpu:")]
    if not any(zone.moved for zone in packages):
        names = ", ".join(zone.domain for zone in zones if not zone.moved)
        _close(zones)
        raise MeterError(f"rapl: no package counter moves ({names} stood still for {still_s:g} s)")
    kept = [zone for zone in zones if zone.moved or zone in packages]
    for zone in zones:
        if zone not in kept:
            zone.close()
            detail = f"the counter of {zone.domain} stands still; it is not in the energy"
            flags.append(Flag(name="meter", severity="warning", detail=detail))
    return kept


def _domain(zone: Zone, flags: tuple[Flag, ...], *, splits: bool) -> Domain:
    memory = zone.domain.startswith("dram:")
    ratio = MEMORY_RATIO if memory else PACKAGE_RATIO
    accuracy = f"a factor of {MEMORY_FACTOR}" if memory else f"{GAIN_LIMIT:.0%} of the reading"
    return Domain(
        name=zone.domain,
        kind="measured",
        source="powercap intel-rapl energy_uj",
        scope="memory" if memory else "package",
        resolution_j=RESOLUTION_J,
        accuracy=f"assumed within {accuracy}",
        limits=_memory_limits if memory else within(GAIN_LIMIT),
        update_period_s=UPDATE_PERIOD_S,
        max_age_s=MAX_AGE_S,
        highest_w=HIGHEST_W,
        cpu_ratio=ratio if splits else None,
        flags=flags,
    )


def _memory_limits(energy_j: float, _duration_s: float) -> tuple[float, float]:
    return energy_j / MEMORY_FACTOR, energy_j * MEMORY_FACTOR


def _close(zones: Sequence[Zone]) -> None:
    for zone in zones:
        zone.close()


def open_rapl(
    targets: Targets,
    *,
    powercap_root: Path = ROOT,
    proc: Path = PROC,
    still_s: float = RAPL_STILL_S,
    pause: Callable[[float], None] = real_time.sleep,
) -> list[RaplMeter]:
    """Open one meter for all packages.

    Raises:
        MeterDoesNotApply: The test uses GPUs.
        MeterError: No counter can be read (the message has a remedy), or none moves.
    """
    if not targets.cpu:
        raise MeterDoesNotApply("rapl: the test uses GPUs; other tests may use the CPU meanwhile")
    zones, flags = open_zones(powercap_root, proc)
    zones = _select_moving(zones, flags, still_s, pause)
    unsplit = targets.unknown_processes or explain_hidden_host(proc)
    return [RaplMeter(zones, flags, still_s, unsplit)]


SPEC = MeterSpec(name="rapl", kind="measured", open=open_rapl)
