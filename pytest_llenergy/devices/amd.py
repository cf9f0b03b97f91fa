# SPDX-License-Identifier: Apache-2.0
"""AMD boards as AMD SMI lists them: an optional part of the inventory (extra ``amd``).

These boards can be listed and measured, but tests lease only NVIDIA boards. This module never initialises
HIP.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.errors import DeviceError

#: ``amdsmi_get_power_cap_info`` counts in microwatts, ``amdsmi_get_gpu_vram_usage`` in MiB (amdsmi.h).
MICRO, MIB = 1e-6, 1 << 20


@dataclass(frozen=True)
class AmdBoard:
    """A board, with the UUID of AMD SMI and sizes in bytes. Values that AMD SMI does not report are None."""

    uuid: str
    name: str | None
    pci_bus_id: str | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    power_limit_w: float | None
    processes: tuple[int, ...] | None


def list_boards() -> tuple[AmdBoard, ...]:
    """Return every AMD board, in the order of AMD SMI.

    Raises:
        DeviceError: The package, its library or the driver is missing.
    """
    smi = import_amdsmi()
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        raise DeviceError(one_line(error)) from None
    try:
        return tuple(_board(smi, handle) for handle in smi.amdsmi_get_processor_handles())
    except smi.AmdSmiException as error:
        raise DeviceError(one_line(error)) from None
    finally:
        smi.amdsmi_shut_down()


def import_amdsmi() -> Any:
    """Import the package ``amdsmi``.

    Raises:
        DeviceError: If it or its library is missing.
    """
    try:
        # Without its library the package prints to standard output and fails with KeyError.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except ImportError:
        raise DeviceError("amdsmi is missing; pip install 'pytest-llenergy[amd]'") from None
    except (KeyError, OSError, AttributeError) as error:
        raise DeviceError(
            f"amdsmi cannot load libamd_smi.so ({error}); install amd-smi-lib of the same ROCm release"
        ) from None
    return amdsmi


def one_line(error: Exception) -> str:
    """Return the message of an AMD SMI error, which may have several lines, as one line."""
    return " ".join(str(error).split())


def _board(smi: Any, handle: Any) -> AmdBoard:
    def read(function: Callable[[Any], Any]) -> Any:
        # Most of these queries fail in a virtual machine.
        with contextlib.suppress(smi.AmdSmiException):
            return function(handle)
        return None

    chip, cap = read(smi.amdsmi_get_gpu_asic_info), read(smi.amdsmi_get_power_cap_info)
    memory, processes = read(smi.amdsmi_get_gpu_vram_usage), read(smi.amdsmi_get_gpu_process_list)
    return AmdBoard(
        uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        name=chip and str(chip["market_name"]),
        pci_bus_id=read(smi.amdsmi_get_gpu_device_bdf),
        memory_bytes=memory and int(memory["vram_total"]) * MIB,
        memory_used_bytes=memory and int(memory["vram_used"]) * MIB,
        power_limit_w=cap and int(cap["power_cap"]) * MICRO,
        processes=None if processes is None else tuple(int(each["pid"]) for each in processes),
    )
