# SPDX-License-Identifier: Apache-2.0
"""What is known of the power sensors on NVIDIA boards, by product: when they look and for how long.

Measured by Yang, Adamek and Armour, "Part-time Power Measurements: nvidia-smi's Lack of Attention",
SC 2024, and in the workbook that comes with the authors' code (github.com/JimZeyuYang/GPU_Power_Benchmark).
They measured the power reading. Whether the energy counter has the same blind time is not settled; it is
assumed here, since that can only make an uncertainty too wide.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: The slowest refresh of a power reading that was measured, in seconds: every board since Turing.
SLOWEST_REFRESH_S = 0.1

#: The span over which boards since Ampere, but for GA100, average what nvmlDeviceGetPowerUsage and field
#: 185 tell, in seconds (nvml.h, nvmlDeviceGetPowerUsage).
AVERAGING_S = 1.0

#: ``NVML_DEVICE_ARCH_AMPERE`` (nvml.h).
AMPERE = 7


class _Sensor(NamedTuple):
    """Looks for ``window_s`` seconds in every ``refresh_s``."""

    products: tuple[str, ...]
    window_s: float
    refresh_s: float
    source: str


_PAPER = "Yang, Adamek, Armour, SC 2024"
_GA100 = ("A100", "A100X", "A800", "A30", "A30X")

_PART_TIME = (
    _Sensor((*_GA100, "H100"), 0.025, 0.1, _PAPER),
    _Sensor(("H800", "H200", "H20", "GH200"), 0.025, 0.1, f"as on the H100, of the same die; {_PAPER}"),
    _Sensor(("P100", "V100"), 0.01, 0.02, _PAPER),
    _Sensor(("Quadro RTX 8000",), 0.02, 0.1, _PAPER),
)


def coverage(product_name: str, update_period_s: float | None = None) -> tuple[float, str]:
    """The share of each tick that the sensor of a product sees (0 to 1), and where that is known from.

    It is window / max(refresh, ``update_period_s``): ticks in quicker succession than the sensor refreshes
    do not make it look longer. Products that are not in the table count as always looking, which was
    measured on Turing, Ampere and Ada boards for desktops and workstations and is a guess on others.
    """
    for sensor in _PART_TIME:
        if _is_one_of(product_name, sensor.products):
            share = sensor.window_s / max(sensor.refresh_s, update_period_s or 0.0)
            looks = f"{sensor.window_s * 1e3:.0f} ms of each {sensor.refresh_s * 1e3:.0f} ms"
            return share, f"the power sensor looks for {looks} ({sensor.source})"
    return 1.0, "no blind time of the power sensor is known"


def known_share(product_name: str) -> float | None:
    """The share of each refresh of which a power reading is the mean; ``None`` where nobody measured it."""
    share, _ = coverage(product_name)
    return share if share < 1 else None


def averaging_s(product_name: str, architecture: int | None) -> float:
    """Seconds over which ``nvmlDeviceGetPowerUsage`` averages; the longest where nothing is known.

    ``architecture`` is NVML's number, ``None`` where the driver does not tell.
    """
    if _is_one_of(product_name, _GA100) or (architecture is not None and architecture < AMPERE):
        return 0.0
    return AVERAGING_S


def _is_one_of(product_name: str, products: tuple[str, ...]) -> bool:
    """Whole words: "A1000" is no A100, and neither is a "RTX 8000 Ada" a "Quadro RTX 8000"."""
    return any(
        re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", product_name) for name in products
    )
