# SPDX-License-Identifier: Apache-2.0
"""Power and energy sensors of Linux hwmon (kernel: Documentation/hwmon/sysfs-interface.rst).

``--energy-meter=hwmon:CHIP[/LABEL]`` names a chip by the content of its ``name`` file, or by its directory if
several chips share a name, and a sensor by its label, or as ``power1`` or ``energy1``. ``@2%`` at the end
states its accuracy, ``@40000W`` its highest power. The kernel does not report what a sensor covers, so
sensors are never selected automatically.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from pytest_llenergy import real_time
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Stated, Targets, parse_stated
from pytest_llenergy.energy.power_readings import Refresh, refresh_from_check, refresh_with_period
from pytest_llenergy.errors import MeterError
from pytest_llenergy.record.record import Flag

ROOT = Path("/sys/class/hwmon")
INPUT = re.compile(r"^(?P<channel>(?P<kind>power|energy)\d+)_(input|average)$")
MICRO = 1e-6

#: Drivers that do not report their refresh period read the chip again within about a second.
SLOWEST_REFRESH_S = 1.0


class Sensor(NamedTuple):
    """One channel. Times in seconds; ``update_period_s`` is ``None`` if the chip does not report it."""

    chip: str
    label: str
    file: Path
    is_power: bool
    smear_s: float = 0.0
    update_period_s: float | None = None

    @property
    def names(self) -> list[str]:
        """What a user may call it."""
        chips = (self.chip, self.file.parent.name)
        labels = (self.label, self.file.name.partition("_")[0])
        return [*chips, *(f"{chip}/{label}" for chip in chips for label in labels)]


class HwmonMeter:
    """One sensor, whose file stays open."""

    name = "hwmon"
    poll_period_s: float = 0.01

    def __init__(self, sensor: Sensor, stated: Stated) -> None:
        """Open the sensor.

        Raises:
            MeterError: If it cannot be read.
        """
        self._sensor = sensor
        self._highest_w = stated.highest_w
        try:
            self._descriptor = os.open(sensor.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MeterError(f"hwmon: {sensor.file} cannot be opened ({error.strerror})") from None
        try:
            refresh = self._refresh()
        except BaseException:
            # The user may interrupt the observation, which takes a second: do not leave the file open.
            self.close()
            raise
        self._power = refresh.integral()
        self.domains: tuple[Domain] = (
            Domain(
                name=f"hwmon:{sensor.chip}/{sensor.label}",
                kind="measured",
                source=f"hwmon {sensor.file.name}" + (" integrated" if sensor.is_power else ""),
                scope=f"what the sensor {sensor.label} of {sensor.chip} is wired to",
                resolution_j=0.0 if sensor.is_power else MICRO,
                accuracy=stated.accuracy.words,
                limits=stated.accuracy.limits,
                covers_others=True,
                update_period_s=refresh.period_s or None,
                max_age_s=refresh.max_age_s,
                smear_s=sensor.smear_s,
                late_s=refresh.late_s,
                integrated=sensor.is_power,
                highest_w=stated.highest_w,
                flags=(*stated.accuracy.flags, *_flags(sensor, refresh)),
            ),
        )

    def _refresh(self) -> Refresh:
        """Return the refresh that the chip reports, or else watch the sensor for a second."""
        self._require_value()
        if not self._sensor.is_power:
            return Refresh(self._sensor.update_period_s or 0.0)
        if self._sensor.update_period_s is not None:
            return refresh_with_period(self._sensor.update_period_s)
        from pytest_llenergy.energy.selfcheck import check_counters

        name = self._sensor.label
        polls = {name: lambda: (None, self._require_value())}
        result = check_counters(polls, {name: SLOWEST_REFRESH_S})[name]
        return refresh_from_check(result, SLOWEST_REFRESH_S)

    def _require_value(self) -> float:
        """Return the value. Raises ``MeterError`` with the reason if it is unavailable."""
        value = self._value()
        if isinstance(value, str):
            raise MeterError(value)
        return value

    def _value(self) -> float | str:
        """Return watts or joules, or the reason why they are unavailable."""
        try:
            text = os.pread(self._descriptor, 32, 0)
        except OSError as error:
            return f"hwmon: {self._sensor.file} cannot be read ({error.strerror})"
        content = text.decode(errors="replace").strip()
        number, is_power = _parse_int(content), self._sensor.is_power
        if number is None or number < 0 or (is_power and number * MICRO > self._highest_w):
            what = f"a power in µW up to {self._highest_w:g} W" if is_power else "an energy in µJ"
            return f"hwmon: {self._sensor.file} reads {content!r}, which is not {what}"
        return number * MICRO

    def read(self) -> list[float | str]:
        value = self._value()
        if isinstance(value, str) or not self._sensor.is_power:
            return [value]
        return [self._power.add(real_time.monotonic(), value)]

    def close(self) -> None:
        os.close(self._descriptor)


def _flags(sensor: Sensor, refresh: Refresh) -> tuple[Flag, ...]:
    """Return the flag for a refresh that neither the chip nor its readings show."""
    if refresh.known:
        return ()
    detail = (
        f"{sensor.chip} does not report how often {sensor.label} is refreshed, and it changed too seldom "
        f"to show it while it was watched; its joules may lag by up to {refresh.late_s[1]:.0f} s"
    )
    return (Flag(name="meter", severity="warning", detail=detail),)


def find_sensor(argument: str, root: Path = ROOT) -> Sensor:
    """Find the sensor called ``CHIP[/LABEL]``.

    Raises:
        MeterError: If none or several are called so, with a list of those on the host.
    """
    known = [sensor for chip in sorted(root.glob("hwmon*")) for sensor in _sensors(chip)]
    found = [sensor for sensor in known if argument in sensor.names]
    if len(found) == 1:
        return found[0]
    problem = f"several sensors are called {argument!r}" if found else f"no sensor {argument!r} under {root}"
    choices = (f"hwmon:{each.file.parent.name}/{each.label} ({each.chip})" for each in found or known)
    raise MeterError(f"hwmon: {problem}; found: {', '.join(choices) or 'none'}")


def _sensors(chip: Path) -> list[Sensor]:
    """Return every channel once, with its present value in preference to its average."""
    sensors: dict[str, Sensor] = {}
    for path in sorted(chip.iterdir(), key=lambda path: path.name.replace("_input", "_")):
        match = INPUT.match(path.name)
        if match and match["channel"] not in sensors:
            sensors[match["channel"]] = Sensor(
                chip=_read_text(chip / "name") or chip.name,
                label=_read_text(chip / f"{match['channel']}_label") or match["channel"],
                file=path,
                is_power=match["kind"] == "power",
                smear_s=_interval_s(chip / f"{path.name}_interval") or 0.0,
                update_period_s=_interval_s(chip / "update_interval"),
            )
    return list(sensors.values())


def _interval_s(file: Path) -> float | None:
    """Return an interval in seconds, ``None`` if the chip reports none."""
    return max(0, _parse_int(_read_text(file) or "") or 0) / 1000 or None


def _parse_int(text: str) -> int | None:
    # Only numbers as the kernel prints them; int() accepts more.
    return int(text) if re.fullmatch(r"\s*-?[0-9]+\s*", text) else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _parse_argument(argument: str) -> tuple[str, Stated]:
    chosen, stated = parse_stated(argument, "hwmon")
    if stated.sensors > 1:
        raise MeterError(f"hwmon: {chosen} is one sensor; leave out @sum={stated.sensors}")
    return chosen, stated


def open_hwmon(_targets: Targets, argument: str, root: Path = ROOT) -> list[HwmonMeter]:
    """Open the sensor.

    Raises:
        MeterError: If it is unknown, ambiguous or unreadable.
    """
    chosen, stated = _parse_argument(argument)
    return [HwmonMeter(find_sensor(chosen, root), stated)]


def check_argument(argument: str) -> None:
    """Check that the sensor exists. Raises ``MeterError``."""
    find_sensor(_parse_argument(argument)[0])


SPEC = MeterSpec(
    name="hwmon",
    kind="measured",
    open=open_hwmon,
    takes_argument=True,
    by_default=False,
    check=check_argument,
)
