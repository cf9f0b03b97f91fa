# SPDX-License-Identifier: Apache-2.0
"""CPU packages and memory: the running average power limit (RAPL) counters of Intel and AMD processors.

Linux shows them in two places. Powercap is asked first: there it shows when two zones are one counter.
Perf events are the other way, for those who may use the one but not the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pytest_llenergy.errors import MeterDoesNotApply, MeterError
from pytest_llenergy.meters import perf_events, powercap
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets, within
from pytest_llenergy.model.record import Flag

#: Permissions of files in /sys are lost at reboot; a udev rule sets them again whenever zones appear.
REMEDY = (
    """echo 'ACTION=="add", SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", """
    """RUN+="/bin/chmod a+r /sys%p/energy_uj"' | sudo tee /etc/udev/rules.d/70-rapl.rules """
    """&& sudo udevadm control -R && sudo udevadm trigger -c add -s powercap"""
)

#: Intel publishes no accuracy. ±5 % is assumed for the package and memory counters of servers.
GAIN_LIMIT = 0.05

#: The hardware counters are refreshed about every millisecond (kernel: Documentation/hwmon/amd_energy;
#: Intel SDM vol. 3B, 15.10.1); not exactly, so that a reading may be somewhat older.
UPDATE_PERIOD_S = 0.001
MAX_AGE_S = 0.002

#: Steps of 61 µJ, the coarsest usual unit of the registers (Intel SDM: 2^-14 J; AMD: 2^-16 J).
RESOLUTION_J = 2**-14

#: A counter that moves every millisecond and has not for this long is broken.
STILL_S = 0.1


class Counter(Protocol):
    """One domain's counter in either place."""

    domain: str

    def energy_j(self) -> float:
        """Joules since it was opened. Raises ``OSError`` or ``ValueError``."""

    def close(self) -> None:
        """Release what was opened."""


class _Watched:
    """A counter, and since when it stands still."""

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
    """Packages and their memory. Cores and graphics lie inside the package, psys around everything."""

    name = "rapl"
    poll_period_s: float = 0.01

    def __init__(
        self,
        counters: Sequence[Counter],
        flags: Sequence[Flag],
        source: str,
        *,
        still_s: float = STILL_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Takes the counters over. Raises ``MeterError`` when no package's counter moves."""
        self._still_s = still_s
        try:
            self._watched = [_Watched(counter) for counter in counters]
            stood = _wait_until_moved(self._watched, still_s, pause)
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
            _domain(each.counter.domain, source, tuple(notes) if index == 0 else ())
            for index, each in enumerate(self._watched)
        )

    def _leave_out(self, still: Sequence[_Watched]) -> list[Flag]:
        """Memory that shows nothing is no reason to refuse the package."""
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


def _is_package(each: _Watched) -> bool:
    return each.counter.domain.startswith("cpu:")


def _wait_until_moved(
    watched: Sequence[_Watched], still_s: float, pause: Callable[[float], None]
) -> list[_Watched]:
    """Those that did not move within ``still_s``."""
    waiting = list(watched)
    for _ in range(round(STILL_S / UPDATE_PERIOD_S)):
        pause(UPDATE_PERIOD_S)
        for each in waiting:
            each.read(still_s)
        waiting = [each for each in waiting if not each.moved]
        if not waiting:
            break
    return waiting


def _domain(name: str, source: str, flags: tuple[Flag, ...]) -> Domain:
    return Domain(
        name=name,
        kind="measured",
        source=source,
        scope="memory" if name.startswith("dram:") else "package",
        resolution_j=RESOLUTION_J,
        accuracy=f"assumed within {GAIN_LIMIT:.0%} of the reading",
        limits=within(GAIN_LIMIT),
        update_period_s=UPDATE_PERIOD_S,
        max_age_s=MAX_AGE_S,
        flags=flags,
    )


def _close(counters: Sequence[Counter]) -> None:
    for counter in counters:
        counter.close()


def open_rapl(
    targets: Targets,
    *,
    powercap_root: Path = powercap.ROOT,
    system_root: Path = perf_events.ROOT,
    still_s: float = STILL_S,
    pause: Callable[[float], None] = time.sleep,
) -> list[RaplMeter]:
    """One meter of all packages, from powercap or else from perf events.

    Raises ``MeterDoesNotApply`` for tests that use GPUs, and ``MeterError`` with both reasons, and what to
    do, where neither can be read or no counter moves.
    """
    if not targets.cpu:
        raise MeterDoesNotApply("rapl: the test uses GPUs; other tests may use the CPU meanwhile")
    counters: Sequence[Counter]
    try:
        counters, flags = powercap.open_zones(powercap_root, pause)
        source = "powercap intel-rapl energy_uj"
    except MeterError as unreadable:
        try:
            counters, flags = perf_events.open_events(system_root)
        except MeterError as refused:
            remedy = f"; {REMEDY}" if isinstance(unreadable.__cause__, PermissionError) else ""
            raise MeterError(f"rapl: {unreadable}; {refused}{remedy}") from None
        source = "perf_event_open power/energy-pkg/, power/energy-ram/"
    return [RaplMeter(counters, flags, source, still_s=still_s, pause=pause)]


SPEC = MeterSpec(name="rapl", kind="measured", open=open_rapl)
