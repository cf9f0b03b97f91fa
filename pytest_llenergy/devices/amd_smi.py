# SPDX-License-Identifier: Apache-2.0
"""AMD SMI: import its package, and read the boards of this host."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.record.environment import Board

#: ``amdsmi_get_power_cap_info`` counts in microwatts, ``amdsmi_get_gpu_vram_usage`` in MiB (amdsmi.h).
MICRO, MIB = 1e-6, 1 << 20

#: UUID of a board of AMD.
AMD_UUID = re.compile(r"GPU-[0-9a-f]{16}")


def is_amd(uuid: str) -> bool:
    """Return whether this is the UUID of an AMD board."""
    return AMD_UUID.fullmatch(uuid) is not None


def import_amdsmi() -> Any:
    """Import the package ``amdsmi``.

    Raises:
        NoDriverError: It or its library is missing.
    """
    try:
        # Without its library the package prints to standard output and fails with KeyError.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except ImportError:
        raise NoDriverError("amdsmi is missing; pip install 'pytest-llenergy[amd]'") from None
    except (KeyError, OSError, AttributeError) as error:
        raise NoDriverError(
            f"amdsmi cannot load libamd_smi.so ({error}); install amd-smi-lib of the same ROCm release"
        ) from None
    return amdsmi


def one_line(error: Exception) -> str:
    """Return the message of an AMD SMI error, which may have several lines, as one line."""
    return " ".join(str(error).split())


def read_amd_uuid(smi: Any, handle: Any) -> str:
    """Return the UUID by which ROCm selects a board, which is its serial number."""
    return f"GPU-{int(str(smi.amdsmi_get_gpu_asic_info(handle)['asic_serial']), 16):016x}"


def read_amd_boards() -> tuple[tuple[Board, ...], dict[int, str]]:
    """Return the boards in the order of AMD SMI, and why others, by their place, do not answer.

    Raises:
        DeviceError: The package or its library is missing, or of a release that answers otherwise.
    """
    smi = import_amdsmi()
    boards: list[Board] = []
    lost: dict[int, str] = {}
    try:
        smi.amdsmi_init()
        handles = list(smi.amdsmi_get_processor_handles())
    except Exception as error:  # of any release
        raise DeviceError(f"AMD SMI: {one_line(error)}; see amd-smi list") from None
    for index, handle in enumerate(handles):
        try:
            boards.append(_read_board(smi, handle))
        except Exception as error:  # of any release
            what = f"{type(error).__name__}: {one_line(error)}"
            lost[index] = f"AMD SMI: GPU {index} does not answer as expected ({what}); see amd-smi static"
    return tuple(boards), lost


def _read_board(smi: Any, handle: Any) -> Board:
    def read(function: Callable[[Any], Any], name: str) -> int | None:
        # These queries fail in a virtual machine.
        with contextlib.suppress(smi.AmdSmiException):
            return int(function(handle)[name])
        return None

    memory = read(smi.amdsmi_get_gpu_vram_usage, "vram_total")
    limit = read(smi.amdsmi_get_power_cap_info, "power_cap")
    return Board(
        uuid=read_amd_uuid(smi, handle),
        name=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        pci_bus_id=str(smi.amdsmi_get_gpu_device_bdf(handle)),
        memory_bytes=None if memory is None else memory * MIB,
        power_limit_w=None if limit is None else limit * MICRO,
    )
