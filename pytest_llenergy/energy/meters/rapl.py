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
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, within
from pytest_llenergy.energy.timeouts import RAPL_MIRROR_PAUSE_S, RAPL_STILL_S
from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.record.record import Flag

ROOT = Path("/sys/class/powercap")

#: Two zones show one counter if each reading of the second lies between the readings of the first around it,
#: within what the first counts in this share of the pause between comparisons: five updates. Two counters
#: that were equal by chance part sooner or later, so they are compared this many times.
MIRROR_SHARE, MIRROR_COMPARISONS = 0.25, 10

#: Highest power of a package or its memory without limits in powercap (W). Processors are specified
#: for 500 W at most (Intel Xeon 6900, AMD EPYC 9005); this leaves room for later ones.
HIGHEST_W = 2000.0

#: The limits that hold within milliseconds. Power may exceed the ``long_term`` limit for many seconds.
SHORT_LIMITS = ("short_term", "peak_power")

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
    kilowatt. A counter that went back has wrapped only if it can have counted the rest of its range since the
    previous reading. Otherwise its joules go back too, as after a reset.

    Attributes:
        limit_w: Power limit, if powercap shows one that holds at all times.
    """

    def __init__(self, directory: Path, domain: str) -> None:
        self.domain = domain
        self._range_uj = int((directory / "max_energy_range_uj").read_text())
        self.limit_w = _limit_w(directory)
        self._descriptor = os.open(directory / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._last_uj, self._read_s = self.raw_uj(), real_time.monotonic()
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
            ValueError: If it holds no number.
        """
        last_uj, last_s = self._last_uj, self._read_s
        self._last_uj, self._read_s = self.raw_uj(), real_time.monotonic()
        step_uj = self._last_uj - last_uj
        most_uj = HIGHEST_W * (self._read_s - last_s + MAX_AGE_S) * 1e6
        if step_uj < 0 and step_uj + self._range_uj <= most_uj:
            step_uj += self._range_uj
        self._total_uj += step_uj
        return self._total_uj / 1e6

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._descriptor)


def _limit_w(zone: Path) -> float | None:
    """Return the highest limit on short-term power (W) that a zone enforces, ``None`` without one."""
    try:
        if (zone / "enabled").read_text().strip() != "1":
            return None
        limits_w = [
            int(path.with_name(path.name.replace("_name", "_power_limit_uw")).read_text()) / 1e6
            for path in zone.glob("constraint_*_name")
            if path.read_text().strip() in SHORT_LIMITS
        ]
    except (OSError, ValueError):
        return None
    # Firmware without limits shows 0, or kilowatts.
    return max((limit_w for limit_w in limits_w if 0 < limit_w < HIGHEST_W), default=None)


def open_zones(
    root: Path = ROOT, pause: Callable[[float], None] = real_time.sleep
) -> tuple[list[Zone], list[Flag]]:
    """Open the zones of packages and their memory. Returns them with flags for those left out.

    Other zones are not opened: cores and graphics are part of the package, psys contains everything, and
    intel-rapl-mmio repeats the packages.

    Raises:
        MeterError: No package can be read.
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
        raise MeterError(f"rapl: no permission to read {error.filename}; {REMEDY}") from None
    except FileNotFoundError as error:
        _close(zones)
        raise MeterError(f"rapl: {error.filename} does not exist; container runtimes hide it") from None
    except (OSError, ValueError) as error:
        _close(zones)
        raise MeterError(f"rapl: {error}") from None
    if not zones:
        raise MeterError(f"rapl: no package counter under {root}")
    return zones, flags


def _add(zones: list[Zone], flags: list[Flag], zone: Zone, pause: Callable[[float], None]) -> None:
    """Keep a zone unless it repeats a counter of another zone, as the dies of some AMD sockets do."""
    zones.append(zone)
    for other in zones[:-1]:
        if other.domain == zone.domain or _mirrors(other, zone, pause):
            detail = f"{zone.domain} shows the same counter as {other.domain} and is not counted"
            flags.append(Flag(name="meter", severity="note", detail=detail))
            zones.pop().close()
            return


def _mirrors(first: Zone, second: Zone, pause: Callable[[float], None]) -> bool:
    """Return whether two zones show one counter, which they must do for as long as they are compared."""
    last_uj = first.raw_uj()
    for _ in range(MIRROR_COMPARISONS):
        pause(RAPL_MIRROR_PAUSE_S)
        before_uj, second_uj, after_uj = first.raw_uj(), second.raw_uj(), first.raw_uj()
        # A counter that wraps meanwhile counts as having stood still.
        apart_uj = MIRROR_SHARE * max(0, before_uj - last_uj)
        late_enough, early_enough = second_uj >= before_uj - apart_uj, second_uj <= after_uj + apart_uj
        wrapped = after_uj < before_uj
        if not (late_enough and early_enough) and not (wrapped and (late_enough or early_enough)):
            return False
        last_uj = after_uj
    return True


class _WatchedZone:
    """A zone, and when its counter last moved."""

    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.moved = False
        self._energy_j = zone.energy_j()
        self._moved_s = real_time.monotonic()

    def read(self, still_s: float) -> float | str:
        domain = self.zone.domain
        try:
            energy_j = self.zone.energy_j()
        except (OSError, ValueError) as error:
            return f"rapl: {domain} cannot be read ({error})"
        now_s = real_time.monotonic()
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
        zones: Sequence[Zone],
        flags: Sequence[Flag],
        *,
        still_s: float = RAPL_STILL_S,
        pause: Callable[[float], None] = real_time.sleep,
        splits: bool = True,
    ) -> None:
        """Take ownership of open zones. ``splits`` is whether the processes of the test are known.

        Raises:
            MeterError: If no counter of a package moves.
        """
        self._still_s = still_s
        try:
            self._watched = [_WatchedZone(zone) for zone in zones]
            stood = _select_unmoving(self._watched, still_s, pause)
            if all(each in stood for each in self._watched if _is_package(each)):
                names = ", ".join(each.zone.domain for each in stood)
                raise MeterError(f"rapl: no package counter moves ({names} stood still for {still_s:g} s)")
        except (OSError, ValueError) as error:
            _close(zones)
            raise MeterError(f"rapl: {error}") from None
        except MeterError:
            _close(zones)
            raise
        notes = [*flags, *self._leave_out([each for each in stood if not _is_package(each)])]
        self.domains: tuple[Domain, ...] = tuple(
            _domain(each.zone, tuple(notes) if index == 0 else (), splits=splits)
            for index, each in enumerate(self._watched)
        )

    def _leave_out(self, still: Sequence[_WatchedZone]) -> list[Flag]:
        """Close counters that stand still: a broken memory counter does not disqualify its package."""
        for each in still:
            self._watched.remove(each)
            each.zone.close()
        return [
            Flag(
                name="meter",
                severity="warning",
                detail=f"the counter of {each.zone.domain} stands still; it is not in the energy",
            )
            for each in still
        ]

    def read(self) -> list[float | str]:
        return [each.read(self._still_s) for each in self._watched]

    def close(self) -> None:
        _close([each.zone for each in self._watched])


def _is_package(each: _WatchedZone) -> bool:
    return each.zone.domain.startswith("cpu:")


def _select_unmoving(
    watched: Sequence[_WatchedZone], still_s: float, pause: Callable[[float], None]
) -> list[_WatchedZone]:
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


def _domain(zone: Zone, flags: tuple[Flag, ...], *, splits: bool) -> Domain:
    memory = zone.domain.startswith("dram:")
    ratio = MEMORY_RATIO if memory else PACKAGE_RATIO
    return Domain(
        name=zone.domain,
        kind="measured",
        source="powercap intel-rapl energy_uj",
        scope="memory" if memory else "package",
        resolution_j=RESOLUTION_J,
        accuracy=f"assumed within {GAIN_LIMIT:.0%} of the reading",
        limits=within(GAIN_LIMIT),
        update_period_s=UPDATE_PERIOD_S,
        max_age_s=MAX_AGE_S,
        highest_w=zone.limit_w or HIGHEST_W,
        cpu_ratio=ratio if splits else None,
        flags=flags,
    )


def _close(zones: Sequence[Zone]) -> None:
    for zone in zones:
        zone.close()


def open_rapl(
    targets: Targets,
    *,
    powercap_root: Path = ROOT,
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
    zones, flags = open_zones(powercap_root, pause)
    splits = targets.unknown_processes is None
    return [RaplMeter(zones, flags, still_s=still_s, pause=pause, splits=splits)]


SPEC = MeterSpec(name="rapl", kind="measured", open=open_rapl)
