# SPDX-License-Identifier: Apache-2.0
"""CPU packages and memory: the RAPL counters (running average power limit) of Intel and AMD processors.

Linux offers them in two places. Powercap is tried first, since it shows whether two zones are one counter;
perf events are for users who may read them but not powercap.

``enabled`` of a powercap zone is about its power *limit* (kernel:
drivers/powercap/intel_rapl_common.c, ``get_domain_enable``). Zones whose limit is off, or locked by the
firmware, count all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.meters import perf_events
from pytest_llenergy.meters.attribution import MEMORY_RATIO, PACKAGE_RATIO
from pytest_llenergy.meters.base import Domain, MeterSpec, Targets, within
from pytest_llenergy.meters.timeouts import RAPL_MIRROR_PAUSE_S, RAPL_STILL_S
from pytest_llenergy.model.record import Flag

ROOT = Path("/sys/class/powercap")

#: Two zones show one counter if each reading of the second lies between the readings of the first around it,
#: within one update (1 ms at a kilowatt). Different counters are kilojoules apart.
MIRROR_UJ = 1_000_000

#: A udev rule, since permissions of files in /sys are lost at reboot.
REMEDY = (
    """echo 'ACTION=="add", SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", """
    """RUN+="/bin/chmod a+r /sys%p/energy_uj"' | sudo tee /etc/udev/rules.d/70-rapl.rules """
    """&& sudo udevadm control -R && sudo udevadm trigger -c add -s powercap"""
)

#: Intel publishes no accuracy. ±5 % is assumed for the package and memory counters of servers.
GAIN_LIMIT = 0.05

#: The counters are updated about every millisecond (kernel: Documentation/hwmon/amd_energy; Intel SDM vol.
#: 3B, 15.10.1), but not exactly, so a reading may be somewhat older.
UPDATE_PERIOD_S = 0.001
MAX_AGE_S = 0.002

#: Steps of 61 µJ, the coarsest usual unit of the registers (Intel SDM: 2^-14 J; AMD: 2^-16 J).
RESOLUTION_J = 2**-14


class Zone:
    """One powercap counter, kept open and followed over wrap-around.

    The registers have 32 bits and wrap after 65 to 262 kJ (units of 15 or 61 µJ), a minute or more at a
    kilowatt. Two readings in less than half of that show every wrap between them.
    """

    def __init__(self, directory: Path, domain: str) -> None:
        self.domain = domain
        self._range_uj = int((directory / "max_energy_range_uj").read_text())
        self._descriptor = os.open(directory / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._last_uj = self.raw_uj()
        except BaseException:
            self.close()
            raise
        self._total_uj = 0

    def raw_uj(self) -> int:
        """Return the raw counter (µJ).

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no number.
        """
        return int(os.pread(self._descriptor, 32, 0))

    def energy_j(self) -> float:
        """Return joules since the zone was opened.

        Raises:
            OSError: If the counter cannot be read.
            ValueError: If it was reset.
        """
        last_uj, self._last_uj = self._last_uj, self.raw_uj()
        step_uj = self._last_uj - last_uj
        if step_uj < 0:
            step_uj += self._range_uj
            if step_uj > self._range_uj / 2:
                raise ValueError(
                    f"the counter went back from {last_uj} to {self._last_uj} µJ, which is not a wrap-around"
                )
        self._total_uj += step_uj
        return self._total_uj / 1e6

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._descriptor)


def open_zones(
    root: Path = ROOT, pause: Callable[[float], None] = time.sleep
) -> tuple[list[Zone], list[Flag]]:
    """Open the zones of packages and their memory. Returns them with flags for those left out.

    Other zones are not opened: cores and graphics are part of the package, psys contains everything, and
    intel-rapl-mmio repeats the packages.

    Raises:
        MeterError: No package can be read; its ``__cause__`` is a ``PermissionError`` if permission is
            missing.
    """
    zones: list[Zone] = []
    flags: list[Flag] = []
    try:
        for package in sorted(root.glob("intel-rapl:[0-9]*")):
            name = (package / "name").read_text().strip()
            if package.name.count(":") > 1 or not name.startswith("package"):
                continue
            _add(zones, flags, Zone(package, f"cpu:{name}"), pause)
            for part in sorted(root.glob(f"{package.name}:[0-9]*")):
                if (part / "name").read_text().strip() == "dram":
                    _add(zones, flags, Zone(part, f"dram:{name}"), pause)
    except PermissionError as error:
        _close(zones)
        raise MeterError(f"no permission to read {error.filename}") from error
    except FileNotFoundError as error:
        _close(zones)
        raise MeterError(f"{error.filename} does not exist; container runtimes hide it") from error
    except (OSError, ValueError) as error:
        _close(zones)
        raise MeterError(str(error)) from error
    if not zones:
        raise MeterError(f"no package counter under {root}")
    return zones, flags


def _add(zones: list[Zone], flags: list[Flag], zone: Zone, pause: Callable[[float], None]) -> None:
    """Keep a zone unless it repeats a counter of another zone, as the dies of some AMD sockets do."""
    zones.append(zone)
    for other in zones[:-1]:
        if other.domain == zone.domain or _mirrors(other, zone, pause):
            detail = f"{zone.domain} shows the same counter as {other.domain} and is not counted"
            flags.append(Flag(name="mirror", severity="note", detail=detail))
            zones.pop().close()
            return


def _mirrors(first: Zone, second: Zone, pause: Callable[[float], None]) -> bool:
    if not _between(first, second):
        return False
    pause(RAPL_MIRROR_PAUSE_S)
    return _between(first, second)


def _between(first: Zone, second: Zone) -> bool:
    before_uj, second_uj, after_uj = first.raw_uj(), second.raw_uj(), first.raw_uj()
    late_enough = second_uj >= before_uj - MIRROR_UJ
    early_enough = second_uj <= after_uj + MIRROR_UJ
    if after_uj < before_uj:
        return late_enough or early_enough
    return late_enough and early_enough


class Counter(Protocol):
    """The counter of one domain, from powercap or perf events."""

    domain: str

    def energy_j(self) -> float:
        """Return joules since it was opened.

        Raises:
            OSError: If the counter cannot be read.
            ValueError: If its value is wrong.
        """

    def close(self) -> None:
        """Release all resources."""


class _WatchedCounter:
    """A counter, and when it last moved."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.moved = False
        self._energy_j = counter.energy_j()
        self._moved_s = time.monotonic()

    def read(self, still_s: float) -> float | str:
        domain = self.counter.domain
        try:
            energy_j = self.counter.energy_j()
        except (OSError, ValueError) as error:
            return f"rapl: {domain} cannot be read ({error})"
        now_s = time.monotonic()
        if energy_j != self._energy_j:
            self._energy_j, self._moved_s, self.moved = energy_j, now_s, True
        elif now_s - self._moved_s > still_s:
            return f"rapl: the counter of {domain} has stood still for {now_s - self._moved_s:.1f} s"
        return energy_j


class RaplMeter:
    """CPU packages and their memory."""

    name = "rapl"
    poll_period_s: float = 0.01

    def __init__(
        self,
        counters: Sequence[Counter],
        flags: Sequence[Flag],
        source: str,
        *,
        still_s: float = RAPL_STILL_S,
        pause: Callable[[float], None] = time.sleep,
        splits: bool = True,
    ) -> None:
        """Take ownership of open counters. ``splits`` is whether the processes of the test are known.

        Raises:
            MeterError: If no counter of a package moves.
        """
        self._still_s = still_s
        try:
            self._watched = [_WatchedCounter(counter) for counter in counters]
            stood = _select_unmoving(self._watched, still_s, pause)
            if all(each in stood for each in self._watched if _is_package(each)):
                names = ", ".join(each.counter.domain for each in stood)
                raise MeterError(f"rapl: no package counter moves ({names} stood still for {still_s:g} s)")
        except (OSError, ValueError) as error:
            _close(counters)
            raise MeterError(f"rapl: {error}") from None
        except MeterError:
            _close(counters)
            raise
        notes = [*flags, *self._leave_out([each for each in stood if not _is_package(each)])]
        self.domains: tuple[Domain, ...] = tuple(
            _domain(each.counter.domain, source, tuple(notes) if index == 0 else (), splits=splits)
            for index, each in enumerate(self._watched)
        )

    def _leave_out(self, still: Sequence[_WatchedCounter]) -> list[Flag]:
        """Close counters that stand still: a broken memory counter does not disqualify its package."""
        for each in still:
            self._watched.remove(each)
            each.counter.close()
        return [
            Flag(
                name="unmoving",
                severity="warning",
                detail=f"the counter of {each.counter.domain} stands still; it is not in the energy",
            )
            for each in still
        ]

    def read(self) -> list[float | str]:
        return [each.read(self._still_s) for each in self._watched]

    def close(self) -> None:
        _close([each.counter for each in self._watched])


def _is_package(each: _WatchedCounter) -> bool:
    return each.counter.domain.startswith("cpu:")


def _select_unmoving(
    watched: Sequence[_WatchedCounter], still_s: float, pause: Callable[[float], None]
) -> list[_WatchedCounter]:
    """Return the counters that did not move within ``still_s``."""
    waiting = list(watched)
    for _ in range(round(RAPL_STILL_S / UPDATE_PERIOD_S)):
        pause(UPDATE_PERIOD_S)
        for each in waiting:
            each.read(still_s)
        waiting = [each for each in waiting if not each.moved]
        if not waiting:
            break
    return waiting


def _domain(name: str, source: str, flags: tuple[Flag, ...], *, splits: bool) -> Domain:
    memory = name.startswith("dram:")
    ratio = MEMORY_RATIO if memory else PACKAGE_RATIO
    return Domain(
        name=name,
        kind="measured",
        source=source,
        scope="memory" if memory else "package",
        resolution_j=RESOLUTION_J,
        accuracy=f"assumed within {GAIN_LIMIT:.0%} of the reading",
        limits=within(GAIN_LIMIT),
        update_period_s=UPDATE_PERIOD_S,
        max_age_s=MAX_AGE_S,
        cpu_ratio=ratio if splits else None,
        flags=flags,
    )


def _close(counters: Sequence[Counter]) -> None:
    for counter in counters:
        counter.close()


def open_rapl(
    targets: Targets,
    *,
    powercap_root: Path = ROOT,
    system_root: Path = perf_events.ROOT,
    still_s: float = RAPL_STILL_S,
    pause: Callable[[float], None] = time.sleep,
) -> list[RaplMeter]:
    """Open one meter for all packages, from powercap or else from perf events.

    Raises:
        MeterDoesNotApply: The test uses GPUs.
        MeterError: Neither can be read (the message has both reasons and a remedy), or no counter moves.
    """
    if not targets.cpu:
        raise MeterDoesNotApply("rapl: the test uses GPUs; other tests may use the CPU meanwhile")
    counters: Sequence[Counter]
    try:
        counters, flags = open_zones(powercap_root, pause)
        source = "powercap intel-rapl energy_uj"
    except MeterError as unreadable:
        try:
            counters, flags = perf_events.open_events(system_root)
        except MeterError as refused:
            remedy = f"; {REMEDY}" if isinstance(unreadable.__cause__, PermissionError) else ""
            raise MeterError(f"rapl: {unreadable}; {refused}{remedy}") from None
        source = "perf_event_open power/energy-pkg/, power/energy-ram/"
    splits = targets.unknown_processes is None
    return [RaplMeter(counters, flags, source, still_s=still_s, pause=pause, splits=splits)]


SPEC = MeterSpec(name="rapl", kind="measured", open=open_rapl)
