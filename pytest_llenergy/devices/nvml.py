# SPDX-License-Identifier: Apache-2.0
"""NVML in this process: open boards, read fields and memory, and turn return codes into messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pytest_llenergy.errors import DeviceError, NoDriverError

T = TypeVar("T")

#: What this package needs of pynvml. Other packages of that name lack some of it.
NEEDED = ("nvmlInit", "nvmlDeviceGetFieldValues", "nvmlMemory_v2", "nvmlDeviceGetComputeRunningProcesses_v3")

#: Member of ``nvmlValue_t`` that holds a value, indexed by ``nvmlValueType_t`` (nvml.h).
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class BoardHandle(NamedTuple):
    """An open board, looked up by its own UUID or by that of one of its MIG instances.

    ``lookup_uuid`` is what was looked up, and ``device`` the NVML handle of that: the board or the instance.
    """

    uuid: str
    name: str
    handle: Any
    lookup_uuid: str
    device: Any

    @property
    def shared(self) -> bool:
        """Whether a MIG instance was looked up, so that others may use the board too."""
        return self.lookup_uuid != self.uuid


class Quantity(NamedTuple):
    """A number that NVML reports for a board, in mJ or mW.

    It is a field with an id and a scope (0 board, 1 module: ``NVML_POWER_SCOPE_*``), or has its own function.
    """

    name: str
    scope: str = "board"
    field: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Name, with the scope if it is not the board."""
        return self.name if self.scope == "board" else f"{self.name} of the {self.scope}"


class Session:
    """NVML from construction to ``close``. NVML counts its initialisations, so sessions may overlap.

    Raises:
        NoDriverError: The host has no driver, or pynvml is missing.
        DeviceError: The driver refuses, or pynvml is another package or file.
    """

    def __init__(self) -> None:
        self.module = nvml = _import_pynvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError_LibraryNotFound as error:
            reason = str(error).removeprefix("NVML ")
            raise NoDriverError(f"NVML: {reason}; install the NVIDIA driver") from None
        except nvml.NVMLError_DriverNotLoaded as error:
            raise NoDriverError(f"NVML: {error}; load the NVIDIA kernel module") from None
        except nvml.NVMLError as error:
            # If the driver refuses, the host may still have a GPU.
            raise DeviceError(f"NVML: {error}; see nvidia-smi") from None

    def close(self) -> None:
        """Shut NVML down."""
        with suppress(self.module.NVMLError):
            self.module.nvmlShutdown()

    def open_board(self, uuid: str) -> BoardHandle:
        """Return the board with this UUID, or the board that the MIG instance with this UUID is part of.

        Raises:
            DeviceError: Neither answers; the message has the UUID and the driver's message.
        """
        nvml = self.module
        try:
            device = handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            # None without support for MIG; else a ctypes integer, which is true whatever its value.
            is_mig = read_or_none(nvml, lambda: nvml.nvmlDeviceIsMigDeviceHandle(device))
            if getattr(is_mig, "value", is_mig):
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
            board_uuid = read_text(nvml.nvmlDeviceGetUUID, handle)
            return BoardHandle(board_uuid, read_text(nvml.nvmlDeviceGetName, handle), handle, uuid, device)
        except nvml.NVMLError as error:
            raise DeviceError(f"NVML: {uuid} does not answer ({error}); see nvidia-smi -L") from None

    def read_fields(self, handle: Any, codes: Sequence[tuple[int, int]]) -> list[float | str]:
        """Read fields, given as (id, scope), in one call: a value or the driver's message for each."""
        try:
            values = self.module.nvmlDeviceGetFieldValues(handle, codes)
        except self.module.NVMLError as error:
            return [str(error)] * len(codes)
        return [
            getattr(value.value, VALUE_MEMBERS[value.valueType])
            if value.nvmlReturn == 0
            else str(self.module.NVMLError(value.nvmlReturn))
            for value in values
        ]

    def read(self, handle: Any, quantities: Sequence[Quantity]) -> list[float | str]:
        """Read quantities in J or W, or the driver's message; all fields in one call."""
        codes = [quantity.field for quantity in quantities if quantity.field is not None]
        fields = iter(self.read_fields(handle, codes) if codes else ())
        raw = [
            self._call(handle, quantity.name) if quantity.field is None else next(fields)
            for quantity in quantities
        ]
        return [value if isinstance(value, str) else value / 1000 for value in raw]

    def make_reader(self, handle: Any, quantity: Quantity) -> Callable[[], float | str]:
        """Return a function that reads one quantity, with everything prepared that is the same each time.

        A background reader runs with cold caches, where memory accesses cost more than computation.
        """
        if quantity.field is None:
            return lambda: self.read(handle, (quantity,))[0]
        module = self.module
        values = (module.c_nvmlFieldValue_t * 1)()
        value = values[0]
        value.fieldId, value.scopeId = quantity.field
        function, union = module.nvmlLib.nvmlDeviceGetFieldValues, value.value

        def read() -> float | str:
            result = function(handle, 1, values) or value.nvmlReturn
            if result:
                return str(module.NVMLError(result))
            return float(getattr(union, VALUE_MEMBERS[value.valueType])) / 1000

        return read

    def _call(self, handle: Any, function: str) -> float | str:
        try:
            return float(getattr(self.module, function)(handle))
        except self.module.NVMLError as error:
            return str(error)


def _import_pynvml() -> Any:
    try:
        # The obsolete package pynvml, which other packages install, warns on import.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except ModuleNotFoundError:
        raise NoDriverError("NVML: the module pynvml is missing; pip install nvidia-ml-py") from None
    if not all(hasattr(pynvml, name) for name in NEEDED):
        raise DeviceError(
            f"NVML: {pynvml.__file__} is not that of nvidia-ml-py; remove it, then pip install "
            "--force-reinstall nvidia-ml-py"
        )
    return pynvml


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


def read_used_bytes(nvml: Any, handle: Any) -> int | None:
    """Return the memory in use on a board or instance; None if the driver does not report it.

    Version 2 of the call, new in driver 510, excludes what the driver reserves for itself; version 1 has
    since included it, some hundred MB (nvml.h: ``nvmlMemory_t``, ``nvmlMemory_v2_t``).
    """
    for version in (nvml.nvmlMemory_v2, None):
        with suppress(nvml.NVMLError):
            return int(nvml.nvmlDeviceGetMemoryInfo(handle, version).used)
    return None
