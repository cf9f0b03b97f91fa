# SPDX-License-Identifier: Apache-2.0
"""Read the GPUs of this host through NVML or AMD SMI, and print them as JSON.

``inventory`` runs this file in a process of its own: a driver call that never returns costs that process, and
not pytest. Standard library only, so that it starts in a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any, TypeVar

T = TypeVar("T")

#: What this package needs of pynvml. Other packages of that name lack some of it.
NEEDED = ("nvmlInit", "nvmlDeviceGetFieldValues", "nvmlMemory_v2", "nvmlDeviceGetComputeRunningProcesses_v3")

#: ``amdsmi_get_power_cap_info`` counts in microwatts, ``amdsmi_get_gpu_vram_usage`` in MiB (amdsmi.h).
MICRO, MIB = 1e-6, 1 << 20

#: Profile names round memory to eighths of the board's (NVIDIA go-nvlib, ``getMigMemorySizeGB``).
MEMORY_PARTS = 8


class ProbeError(Exception):
    """A driver refuses, or its package is not what it should be."""


class MissingDriverError(ProbeError):
    """The driver or its package is not installed."""


def open_nvml() -> Any:
    """Initialise NVML and return the module pynvml.

    Raises:
        MissingDriverError: The host has no driver, or pynvml is missing.
        ProbeError: The driver refuses, or pynvml is another package.
    """
    pynvml = _import_pynvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        reason = str(error).removeprefix("NVML ")
        raise MissingDriverError(f"NVML: {reason}; install the NVIDIA driver") from None
    except pynvml.NVMLError_DriverNotLoaded as error:
        raise MissingDriverError(f"NVML: {error}; load the NVIDIA kernel module") from None
    except pynvml.NVMLError as error:
        # If the driver refuses, the host may still have a GPU.
        raise ProbeError(f"NVML: {error}; see nvidia-smi") from None
    return pynvml


@cache
def _import_pynvml() -> Any:
    """Import pynvml of nvidia-ml-py, whatever other module of that name comes first."""
    try:
        # The obsolete package pynvml, which other packages install, warns on import.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except ModuleNotFoundError:
        raise MissingDriverError("NVML: the module pynvml is missing; pip install nvidia-ml-py") from None
    except Exception:  # a file of the project may raise anything
        pynvml = None
    if all(hasattr(pynvml, name) for name in NEEDED):
        return pynvml
    # Slow to import, and seldom needed.
    from importlib.metadata import PackageNotFoundError, distribution

    name = "_llenergy_pynvml"
    try:
        path = str(distribution("nvidia-ml-py").locate_file("pynvml.py"))
        spec = spec_from_file_location(name, path)
        module = sys.modules[name] = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except (PackageNotFoundError, OSError):
        raise ProbeError(
            f"NVML: {getattr(pynvml, '__file__', 'pynvml')} is not that of nvidia-ml-py; remove it, then "
            "pip install --force-reinstall nvidia-ml-py"
        ) from None
    return module


def read_or_none(nvml: Any, read: Callable[[], T]) -> T | None:
    """Return a value, or None if NVML does not support it."""
    try:
        return read()
    except nvml.NVMLError:
        return None


def read_text(function: Any, *arguments: Any) -> str:
    """Call a function of pynvml that returns text, which may have bytes that are not UTF-8."""
    text = getattr(function, "__wrapped__", function)(*arguments)
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def read_nvidia() -> dict[str, Any]:
    """Return all boards and MIG instances, as the fields of an ``Inventory``.

    Raises:
        ProbeError: As for ``open_nvml``.
    """
    nvml = open_nvml()
    boards: list[dict[str, Any]] = []
    instances: list[dict[str, Any]] = []
    mig_enabled: list[str] = []
    lost: dict[int, str] = {}
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise ProbeError(f"NVML: the driver does not count its GPUs ({error}); see nvidia-smi") from None
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            board = _read_board(nvml, handle)
            instances += _read_instances(nvml, handle, board)
        except nvml.NVMLError as error:
            # NVML still counts the board, so the others keep their positions.
            lost[index] = f"NVML: GPU {index} does not answer ({error}); see nvidia-smi"
            continue
        boards.append(board)
        mode = read_or_none(nvml, lambda handle=handle: nvml.nvmlDeviceGetMigMode(handle)[0])  # type: ignore[misc]
        mig_enabled += [board["uuid"]] if mode else []
    driver = read_or_none(nvml, lambda: read_text(nvml.nvmlSystemGetDriverVersion))
    return {
        "boards": boards,
        "instances": instances,
        "mig_enabled": mig_enabled,
        "lost": lost,
        "driver": driver,
    }


def _read_board(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "uuid": read_text(nvml.nvmlDeviceGetUUID, handle),
        "name": read_text(nvml.nvmlDeviceGetName, handle),
        "pci_bus_id": str(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "memory_bytes": read_or_none(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "power_limit_w": read_or_none(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    }


def _read_instances(nvml: Any, handle: Any, board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the instances of a board in the driver's order; empty for an undivided board."""
    # None if the driver or the board does not support MIG.
    count = read_or_none(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0
    instances = []
    for index in range(count):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            # The slot is empty.
            continue
        memory = read_or_none(nvml, lambda each=instance: int(nvml.nvmlDeviceGetMemoryInfo(each).total))  # type: ignore[misc]
        instances.append(
            {
                "uuid": read_text(nvml.nvmlDeviceGetUUID, instance),
                "board": board["uuid"],
                "gpu_instance": int(nvml.nvmlDeviceGetGpuInstanceId(instance)),
                "compute_instance": int(nvml.nvmlDeviceGetComputeInstanceId(instance)),
                "profile": _read_profile(nvml, instance, board["memory_bytes"]),
                "memory_bytes": memory,
            }
        )
    return instances


def _read_profile(nvml: Any, instance: Any, board_memory_bytes: int | None) -> str | None:
    attributes = read_or_none(nvml, lambda: nvml.nvmlDeviceGetAttributes(instance))
    if attributes is None or not board_memory_bytes:
        return None
    parts = math.ceil(attributes.memorySizeMB * MIB / board_memory_bytes * MEMORY_PARTS)
    memory_gb = round(parts / MEMORY_PARTS * math.ceil(board_memory_bytes / 2**30))
    gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    return f"{gpu}g.{memory_gb}gb" if gpu == compute else f"{compute}c.{gpu}g.{memory_gb}gb"


def import_amdsmi() -> Any:
    """Import the package ``amdsmi``.

    Raises:
        ProbeError: It or its library is missing.
    """
    try:
        # Without its library the package prints to standard output and fails with KeyError.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except ImportError:
        raise MissingDriverError("amdsmi is missing; pip install 'pytest-llenergy[amd]'") from None
    except (KeyError, OSError, AttributeError) as error:
        raise MissingDriverError(
            f"amdsmi cannot load libamd_smi.so ({error}); install amd-smi-lib of the same ROCm release"
        ) from None
    return amdsmi


def one_line(error: Exception) -> str:
    """Return the message of an AMD SMI error, which may have several lines, as one line."""
    return " ".join(str(error).split())


def read_amd_uuid(smi: Any, handle: Any) -> str:
    """Return the UUID by which ROCm selects a board, which is its serial number."""
    return f"GPU-{int(str(smi.amdsmi_get_gpu_asic_info(handle)['asic_serial']), 16):016x}"


def read_amd() -> dict[str, Any]:
    """Return all AMD boards in the order of AMD SMI, as the fields of an ``Inventory``.

    Raises:
        ProbeError: The package or its library is missing, or of a release that answers otherwise.
    """
    smi = import_amdsmi()
    boards: list[dict[str, Any]] = []
    lost: dict[int, str] = {}
    try:
        smi.amdsmi_init()
        handles = list(smi.amdsmi_get_processor_handles())
    except Exception as error:  # of any release
        raise ProbeError(f"AMD SMI: {one_line(error)}; see amd-smi list") from None
    for index, handle in enumerate(handles):
        try:
            boards.append(_read_amd_board(smi, handle))
        except Exception as error:  # of any release
            what = f"{type(error).__name__}: {one_line(error)}"
            lost[index] = f"AMD SMI: GPU {index} does not answer as expected ({what}); see amd-smi static"
    return {"boards": boards, "lost": lost}


def _read_amd_board(smi: Any, handle: Any) -> dict[str, Any]:
    def read(function: Callable[[Any], Any], name: str) -> Any:
        # These queries fail in a virtual machine.
        with contextlib.suppress(smi.AmdSmiException):
            return function(handle)[name]
        return None

    memory = read(smi.amdsmi_get_gpu_vram_usage, "vram_total")
    limit = read(smi.amdsmi_get_power_cap_info, "power_cap")
    return {
        "uuid": read_amd_uuid(smi, handle),
        "name": str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        "pci_bus_id": str(smi.amdsmi_get_gpu_device_bdf(handle)),
        "memory_bytes": None if memory is None else int(memory) * MIB,
        "power_limit_w": None if limit is None else int(limit) * MICRO,
    }


def probe() -> dict[str, Any]:
    """Return the fields of an ``Inventory``: the NVIDIA boards, or on a host without any the AMD boards."""
    try:
        found = read_nvidia()
    except MissingDriverError as error:
        found = {"driver_missing": str(error)}
    except ProbeError as error:
        return {"error": str(error)}
    if not found.get("boards") and not found.get("lost") and find_spec("amdsmi"):
        try:
            found |= read_amd()
        except MissingDriverError as error:
            found["driver_missing"] = f"{found.get('driver_missing', 'NVML shows none')}; AMD SMI: {error}"
        except ProbeError as error:
            return {"error": str(error)}
    return found


def _main() -> None:
    if sys.platform == "linux":
        # A driver that hangs must not keep it when pytest is gone (PR_SET_PDEATHSIG, prctl(2)).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # The folder of this script, and the current directory, have modules that are none of its own.
    sys.path[:] = [place for place in sys.path[1:] if place]
    # What libraries print must not come into the answer.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(probe(), answer)


if __name__ == "__main__":
    _main()
