# SPDX-License-Identifier: Apache-2.0
"""CPU packages and memory: the running average power limit (RAPL) counters in Linux powercap."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets, within

POWERCAP = Path("/sys/class/powercap")

REMEDY = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"

#: Intel publishes no accuracy. ±5 % is assumed for the package and memory counters of servers.
GAIN_LIMIT = 0.05

#: The hardware counters are refreshed about every millisecond (kernel: Documentation/hwmon/amd_energy;
#: Intel SDM vol. 3B, 15.10.1).
UPDATE_PERIOD_S = 0.001


class _Zone:
    """One counter: keeps its descriptor open and follows it over wrap-around."""

    def __init__(self, directory: Path, domain: str) -> None:
        self.domain = domain
        self._range_uj = int((directory / "max_energy_range_uj").read_text())
        self._descriptor = os.open(directory / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._last_uj = self._raw()
        except BaseException:
            self.close()
            raise
        self._total_uj = 0

    def _raw(self) -> int:
        return int(os.pread(self._descriptor, 32, 0))

    def energy_j(self) -> float:
        """Joules since the zone was opened. A value below the last one means one wrap-around."""
        value = self._raw()
        step = value - self._last_uj
        self._total_uj += step if step >= 0 else step + self._range_uj
        self._last_uj = value
        return self._total_uj / 1e6

    def close(self) -> None:
        os.close(self._descriptor)


class RaplMeter:
    """Packages and their memory. Cores and graphics lie inside the package, psys around everything."""

    name = "rapl"
    poll_period_s = 0.01

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones = _open_zones(root)
        self.domains = tuple(
            Domain(
                name=zone.domain,
                kind="measured",
                source="powercap intel-rapl energy_uj",
                scope="memory" if zone.domain.startswith("dram:") else "package",
                update_period_s=UPDATE_PERIOD_S,
                resolution_j=1e-6,
                accuracy=f"assumed within {GAIN_LIMIT:.0%} of the reading",
                limits=within(GAIN_LIMIT),
            )
            for zone in self._zones
        )

    def read(self) -> list[float | str]:
        values: list[float | str] = []
        for zone in self._zones:
            try:
                values.append(zone.energy_j())
            except (OSError, ValueError) as error:
                values.append(f"rapl: {zone.domain} cannot be read ({error})")
        return values

    def close(self) -> None:
        for zone in self._zones:
            zone.close()


def _open_zones(root: Path) -> list[_Zone]:
    zones: list[_Zone] = []
    try:
        # intel-rapl-mmio:* mirrors the same counters and is left out.
        for package in sorted(root.glob("intel-rapl:[0-9]*")):
            name = (package / "name").read_text().strip()
            if package.name.count(":") > 1 or not name.startswith("package"):
                continue
            zones.append(_Zone(package, f"cpu:{name}"))
            for part in sorted(root.glob(f"{package.name}:[0-9]*")):
                if (part / "name").read_text().strip() == "dram":
                    zones.append(_Zone(part, f"dram:{name}"))
    except PermissionError as error:
        _close(zones)
        raise MeterError(f"rapl: no permission to read {error.filename}; {REMEDY}") from None
    except (OSError, ValueError) as error:
        _close(zones)
        raise MeterError(f"rapl: {error}") from None
    if not zones:
        raise MeterError(f"rapl: no package counter under {root}")
    return zones


def _close(zones: list[_Zone]) -> None:
    for zone in zones:
        zone.close()


def open_rapl(targets: Targets) -> RaplMeter:
    """Raises ``MeterError`` where powercap shows no readable package, or the test uses GPUs."""
    if not targets.cpu:
        raise MeterError("rapl: the test uses GPUs; other tests may use the CPU meanwhile")
    return RaplMeter()


SPEC = MeterSpec(name="rapl", kind="measured", open=open_rapl)
