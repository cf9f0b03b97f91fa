# SPDX-License-Identifier: Apache-2.0
"""Power and energy sensors of Linux hwmon (kernel: Documentation/hwmon/sysfs-interface.rst).

``--energy-meter=hwmon:CHIP[/LABEL]``: a chip by what its ``name`` file says, or by its directory where
several have one name; a sensor by its label, or ``power1``, ``energy1``. ``@2%`` at the end states its
accuracy. What a sensor covers is known to whoever wired it, so none is used unless it is named.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.accuracy import Accuracy, split_accuracy
from pytest_llenergy.meters.power import IntegratedPower
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets
from pytest_llenergy.model.record import Flag

ROOT = Path("/sys/class/hwmon")
INPUT = re.compile(r"^(?P<channel>(?P<kind>power|energy)\d+)_(?P<what>input|average)$")
MICRO = 1e-6


@dataclass(frozen=True)
class Sensor:
    """One channel. Times in seconds; ``update_period_s`` is ``None`` where the chip does not tell."""

    chip: str
    label: str
    file: Path
    is_power: bool
    smear_s: float = 0.0
    smear_known: bool = True
    update_period_s: float | None = None


class HwmonMeter:
    """One sensor, its file kept open."""

    name = "hwmon"
    poll_period_s = 0.01

    def __init__(self, sensor: Sensor, accuracy: Accuracy) -> None:
        """Raises ``MeterError`` when the sensor cannot be read."""
        self._sensor = sensor
        self._power = IntegratedPower(sensor.update_period_s or 0.0)
        try:
            self._descriptor = os.open(sensor.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MeterError(f"hwmon: {sensor.file} cannot be opened ({error.strerror})") from None
        try:
            self._micro()
        except (OSError, ValueError) as error:
            self.close()
            raise MeterError(f"hwmon: {sensor.file} cannot be read ({error})") from None
        self.domains = (
            Domain(
                name=f"hwmon:{sensor.chip}/{sensor.label}",
                kind="measured",
                source=f"hwmon {sensor.file.name}" + (" integrated" if sensor.is_power else ""),
                scope=f"what the sensor {sensor.label} of {sensor.chip} is wired to",
                resolution_j=0.0 if sensor.is_power else MICRO,
                accuracy=accuracy.words,
                limits=accuracy.limits,
                covers_others=True,
                update_period_s=sensor.update_period_s,
                smear_s=sensor.smear_s,
                flags=(*accuracy.flags, *_flags(sensor)),
            ),
        )

    def _micro(self) -> int:
        return int(os.pread(self._descriptor, 32, 0))

    def read(self) -> list[float | str]:
        try:
            value = self._micro() * MICRO
        except (OSError, ValueError) as error:
            return [f"hwmon: {self._sensor.file} cannot be read ({error})"]
        return [self._power.add(time.monotonic(), value) if self._sensor.is_power else value]

    def close(self) -> None:
        os.close(self._descriptor)


def _flags(sensor: Sensor) -> list[Flag]:
    """What the chip leaves in the dark."""
    flags = []
    if sensor.is_power and sensor.update_period_s is None:
        detail = (
            f"{sensor.chip} does not tell how often {sensor.label} is refreshed: short windows may miss it"
        )
        flags.append(Flag(name="refresh-unknown", severity="note", detail=detail))
    if not sensor.smear_known:
        detail = f"{sensor.chip} does not tell over how long {sensor.label} is averaged: phases may blur"
        flags.append(Flag(name="averaging-unknown", severity="note", detail=detail))
    return flags


def find_sensor(argument: str, root: Path = ROOT) -> Sensor:
    """The sensor called ``CHIP[/LABEL]``. Raises ``MeterError`` listing what there is."""
    name, _, label = argument.partition("/")
    chip = _find_chip(name, root)
    sensors = _sensors(chip)
    if not sensors:
        raise MeterError(f"hwmon: {chip} ({name}) has no power or energy sensor")
    found = [sensor for sensor in sensors if label in ("", sensor.label, sensor.file.name.split("_")[0])]
    if len(found) == 1:
        return found[0]
    what = f"has no sensor {label!r}" if label else "has several sensors"
    labels = ", ".join(f"hwmon:{name}/{sensor.label}" for sensor in sensors)
    raise MeterError(f"hwmon: {chip} ({name}) {what}; choose one of {labels}")


def _find_chip(name: str, root: Path) -> Path:
    chips = {path: _text(path / "name") or "" for path in sorted(root.glob("hwmon*"))}
    found = [path for path in chips if name in (path.name, chips[path])]
    if len(found) == 1:
        return found[0]
    if found:
        directories = ", ".join(path.name for path in found)
        raise MeterError(
            f"hwmon: several chips are called {name!r}; name one by its directory: {directories}"
        )
    names = ", ".join(sorted({chip for chip in chips.values() if chip})) or "none"
    raise MeterError(f"hwmon: no chip {name!r} under {root}; found: {names}")


def _sensors(chip: Path) -> list[Sensor]:
    """Every channel once: its present value rather than its average."""
    sensors: dict[str, Sensor] = {}
    for path in sorted(chip.iterdir(), key=lambda path: path.name.replace("_input", "_")):
        match = INPUT.match(path.name)
        if match and match["channel"] not in sensors:
            sensors[match["channel"]] = _sensor(chip, path, match["channel"], match["what"] == "average")
    return list(sensors.values())


def _sensor(chip: Path, path: Path, channel: str, averaged: bool) -> Sensor:
    average_ms = _text(chip / f"{channel}_average_interval") if averaged else "0"
    update_ms = _text(chip / "update_interval")
    return Sensor(
        chip=_text(chip / "name") or chip.name,
        label=_text(chip / f"{channel}_label") or channel,
        file=path,
        is_power=channel.startswith("power"),
        smear_s=float(average_ms or 0) / 1000,
        smear_known=average_ms is not None,
        update_period_s=float(update_ms) / 1000 if update_ms else None,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def open_hwmon(_targets: Targets, argument: str, root: Path = ROOT) -> list[HwmonMeter]:
    """Raises ``MeterError`` where the sensor is unknown, not the only one of its name, or unreadable."""
    chosen, accuracy = split_accuracy(argument, "hwmon")
    return [HwmonMeter(find_sensor(chosen, root), accuracy)]


SPEC = MeterSpec(name="hwmon", kind="measured", open=open_hwmon, takes_argument=True, by_default=False)
