# SPDX-License-Identifier: Apache-2.0
"""AMD boards: inventory through AMD SMI, visibility through ROCm's variables."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.devices.visibility import BOARD_PREFIX, VARIABLE, Visible, matching, read_list
from pytest_llenergy.errors import DeviceError

# AMD boards as AMD SMI shows them: an optional source of the inventory (extra ``amd``).
#
# They are listed and measured; tests lease NVIDIA boards only. Nothing here starts HIP.

#: ``amdsmi_get_power_cap_info`` counts in microwatts, ``amdsmi_get_gpu_vram_usage`` in MiB (amdsmi.h).
MICRO, MIB = 1e-6, 1 << 20


@dataclass(frozen=True)
class AmdBoard:
    """One board, by the UUID that AMD SMI gives. Bytes and watts; what is not told is ``None``."""

    uuid: str
    name: str | None
    pci_bus_id: str | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    power_limit_w: float | None
    processes: tuple[int, ...] | None


def boards() -> tuple[AmdBoard, ...]:
    """Every AMD board, in the order of AMD SMI.

    Raises ``DeviceError`` where the package, its library or the driver is missing.
    """
    smi = import_smi()
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


def import_smi() -> Any:
    """The package ``amdsmi``. Raises ``DeviceError`` without it or its library."""
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
    """What AMD SMI said, which may be several lines."""
    return " ".join(str(error).split())


def _board(smi: Any, handle: Any) -> AmdBoard:
    def told(ask: Callable[[Any], Any]) -> Any:
        # Guests of a virtual machine are told little.
        with contextlib.suppress(smi.AmdSmiException):
            return ask(handle)
        return None

    chip, cap = told(smi.amdsmi_get_gpu_asic_info), told(smi.amdsmi_get_power_cap_info)
    memory, processes = told(smi.amdsmi_get_gpu_vram_usage), told(smi.amdsmi_get_gpu_process_list)
    return AmdBoard(
        uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        name=chip and str(chip["market_name"]),
        pci_bus_id=told(smi.amdsmi_get_gpu_device_bdf),
        memory_bytes=memory and int(memory["vram_total"]) * MIB,
        memory_used_bytes=memory and int(memory["vram_used"]) * MIB,
        power_limit_w=cap and int(cap["power_cap"]) * MICRO,
        processes=None if processes is None else tuple(int(each["pid"]) for each in processes),
    )


# Which AMD boards a process may use: ``ROCR_VISIBLE_DEVICES``, then ``HIP_`` or ``CUDA_VISIBLE_DEVICES``.
#
# The first acts below HIP: what it leaves is numbered anew, and the other selects among that. A UUID is
# ``GPU-`` and 16 hexadecimal digits; boards stand in the order of the ROCm runtime (``rocminfo``), which need
# not be that of AMD SMI.

BELOW_HIP = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str], present: Sequence[str]) -> Visible:
    """The UUIDs that HIP would enumerate, among those of all boards.

    ``HIP_VISIBLE_DEVICES`` is preferred to ``CUDA_VISIBLE_DEVICES``; lists are read as CUDA reads them,
    which is how torch reads them here too. Raises ``DeviceError`` as torch raises, where HIP is to select
    more boards than the runtime below leaves.
    """
    below = environment.get(BELOW_HIP)
    variable = HIP if HIP in environment else VARIABLE
    value = environment.get(variable)
    left = _below_hip(below, present) if below is not None else Visible(tuple(present))
    if value is None:
        return left
    if below is not None and variable == HIP and len(value.split(",")) > len(below.split(",")):
        raise DeviceError(
            f"{HIP}={value!r} names more boards than {BELOW_HIP}={below!r}, which leaves it "
            f"{len(left.uuids)}, counted from 0; name no more than those"
        )
    found = read_list(value, left.uuids)
    reasons = (left.reason, f"{variable}: {found.reason}" if found.reason else None)
    return Visible(found.uuids, "; ".join(filter(None, reasons)) or None)


def _below_hip(value: str, present: Sequence[str]) -> Visible:
    """Numbers and UUIDs, in any mixture and either case; the first that fits no board ends the list.

    So does, unlike in CUDA, one that comes a second time (ROCR-Runtime, ``amd_filter_device.cpp``).
    """
    chosen: list[str] = []
    names = [(uuid.upper(), uuid) for uuid in present]
    for element in value.split(",") if value else ():
        text = element.strip().upper()
        if text.startswith(BOARD_PREFIX) and text != BOARD_PREFIX:
            matches = matching(text, names)
        else:
            matches = list(present[int(text) :][:1]) if text.isascii() and text.isdecimal() else []
        if len(matches) != 1:
            return Visible(tuple(chosen), f"{BELOW_HIP}: {element!r} names no single board and ends the list")
        if matches[0] in chosen:
            return Visible(tuple(chosen), f"{BELOW_HIP}: {element!r} comes a second time and ends the list")
        chosen.append(matches[0])
    return Visible(tuple(chosen))
