# SPDX-License-Identifier: Apache-2.0
"""CPU packages and memory through Linux powercap: one file for each RAPL counter.

``enabled`` of a zone says whether its power *limit* is on (kernel: drivers/powercap/intel_rapl_common.c,
``get_domain_enable``). Zones whose limit is off, or locked by the firmware, count all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from pytest_llenergy.errors import MeterError
from pytest_llenergy.model.record import Flag

ROOT = Path("/sys/class/powercap")

#: Two zones show one counter when each reading of the second lies between readings of the first around it,
#: give or take one refresh (1 ms at a kilowatt). Counters of their own are kilojoules apart.
MIRROR_UJ = 1_000_000
MIRROR_PAUSE_S = 0.02


class Zone:
    """One counter: keeps its descriptor open and follows it over wrap-around.

    The registers have 32 bits and wrap after 65 to 262 kJ (units of 15 or 61 µJ), a minute or more at a
    kilowatt, so two readings in less than half of that know every wrap between them.
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
        """The counter as it stands. Raises ``OSError`` or ``ValueError``."""
        return int(os.pread(self._descriptor, 32, 0))

    def energy_j(self) -> float:
        """Joules since the zone was opened. Raises ``OSError`` or ``ValueError``, also after a reset."""
        last_uj, self._last_uj = self._last_uj, self.raw_uj()
        step_uj = self._last_uj - last_uj
        if step_uj < 0:
            step_uj += self._range_uj
            if step_uj > self._range_uj / 2:
                raise ValueError(
                    f"the counter went back from {last_uj} to {self._last_uj} µJ, which is no wrap"
                )
        self._total_uj += step_uj
        return self._total_uj / 1e6

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._descriptor)


def open_zones(
    root: Path = ROOT, pause: Callable[[float], None] = time.sleep
) -> tuple[list[Zone], list[Flag]]:
    """Packages and their memory, and notes on those left out.

    Cores and graphics lie inside the package, psys lies around everything, and intel-rapl-mmio shows the
    packages once more: none of them is opened. Raises ``MeterError``; its ``__cause__`` is a
    ``PermissionError`` where a counter may not be read.
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
        close_all(zones)
        raise MeterError(f"no permission to read {error.filename}") from error
    except FileNotFoundError as error:
        close_all(zones)
        raise MeterError(f"{error.filename} is not there; container engines hide it") from error
    except (OSError, ValueError) as error:
        close_all(zones)
        raise MeterError(str(error)) from error
    if not zones:
        raise MeterError(f"no package counter under {root}")
    return zones, flags


def _add(zones: list[Zone], flags: list[Flag], zone: Zone, pause: Callable[[float], None]) -> None:
    """Keep a zone unless it shows a counter that is there already, as the dies of some AMD sockets do."""
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
    pause(MIRROR_PAUSE_S)
    return _between(first, second)


def _between(first: Zone, second: Zone) -> bool:
    before_uj, seen_uj, after_uj = first.raw_uj(), second.raw_uj(), first.raw_uj()
    late_enough = seen_uj >= before_uj - MIRROR_UJ
    early_enough = seen_uj <= after_uj + MIRROR_UJ
    if after_uj < before_uj:
        return late_enough or early_enough
    return late_enough and early_enough


def close_all(zones: list[Zone]) -> None:
    """Release every descriptor."""
    for zone in zones:
        zone.close()
