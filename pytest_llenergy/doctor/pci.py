# SPDX-License-Identifier: Apache-2.0
"""GPUs that the kernel sees on the PCI bus, driver or not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SYSFS = Path("/sys/bus/pci/devices")

#: PCI vendors (pci.ids), and the class of display controllers (PCI Code and ID Assignment, base class 03h).
NVIDIA, AMD = 0x10DE, 0x1002
DISPLAY = 0x03


def display_devices(vendor: int, root: Path = SYSFS) -> tuple[str, ...]:
    """PCI addresses of the vendor's display controllers; empty where the bus cannot be read."""
    found = []
    with suppress(OSError, ValueError):
        for device in sorted(root.iterdir()):
            kind = int((device / "class").read_text(), 16) >> 16
            if kind == DISPLAY and int((device / "vendor").read_text(), 16) == vendor:
                found.append(device.name)
    return tuple(found)
