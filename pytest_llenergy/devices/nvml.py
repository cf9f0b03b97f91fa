# SPDX-License-Identifier: Apache-2.0
"""NVML in this process: open boards, read fields and memory, and turn return codes into messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pytest_llenergy.devices.probe import (
    MissingDriverError,
    ProbeError,
    open_nvml,
    read_or_none,
    read_text,
)
from pytest_llenergy.errors import DeviceError, NoDriverError

#: Member of ``nvmlValue_t`` that holds a value, indexed by ``nvmlValueType_t`` (nvml.h).
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class BoardHandle(NamedTuple):
    """An open board, looked up by its own UUID or by that of one of its MIG instances.

    Attributes:
        uuid: UUID of the board.
        name: Product name.
        handle: NVML handle of the board.
        lookup_uuid: UUID that was looked up.
        device: NVML handle of what ``lookup_uuid`` names: the board, or the instance.
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
        DeviceError: The driver refuses.
    """

    def __init__(self) -> None:
        try:
            self.module: Any = open_nvml()
        except MissingDriverError as error:
            raise NoDriverError(str(error)) from None
        except ProbeError as error:
            raise DeviceError(str(error)) from None

    def close(self) -> None:
        """Shut NVML down."""
        with suppress(self.module.NVMLError):
            self.module.nvmlShutdown()

    def open_board(self, uuid: str) -> BoardHandle:
        """Return the board with this UUID, or the board that the MIG instance with this UUID is part of.

        Raises:
            DeviceError: Neither answers; the message has the UUID and the driver's message.
        """
        try:
            device = handle = self.module.nvmlDeviceGetHandleByUUID(uuid)
            if self._is_mig(device):
                handle = self.module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
            board_uuid = read_text(self.module.nvmlDeviceGetUUID, handle)
            name = read_text(self.module.nvmlDeviceGetName, handle)
            return BoardHandle(board_uuid, name, handle, uuid, device)
        except self.module.NVMLError as error:
            raise DeviceError(f"NVML: {uuid} does not answer ({error}); see nvidia-smi -L") from None

    def _is_mig(self, handle: Any) -> bool:
        try:
            answer = self.module.nvmlDeviceIsMigDeviceHandle(handle)
            # pynvml returns a ctypes integer, which is true whatever its value.
            return bool(getattr(answer, "value", answer))
        except self.module.NVMLError:
            # The driver or the board does not support MIG.
            return False

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
        """Read quantities in J or W, or the driver's message; in one call if all of them are fields."""
        codes = [quantity.field for quantity in quantities if quantity.field is not None]
        if len(codes) == len(quantities):
            raw = self.read_fields(handle, codes)
        else:
            raw = [self._read_raw(handle, quantity) for quantity in quantities]
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

    def _read_raw(self, handle: Any, quantity: Quantity) -> float | str:
        if quantity.field is not None:
            return self.read_fields(handle, (quantity.field,))[0]
        try:
            return float(getattr(self.module, quantity.name)(handle))
        except self.module.NVMLError as error:
            return str(error)


def read_used_bytes(nvml: Any, handle: Any) -> int | None:
    """Return the memory in use on a board or instance; None if the driver does not report it.

    Version 2 of the call, new in driver 510, excludes what the driver reserves for itself; version 1 has
    since included it, some hundred MB (nvml.h: ``nvmlMemory_t``, ``nvmlMemory_v2_t``).
    """
    for version in (nvml.nvmlMemory_v2, None):
        used = read_or_none(nvml, partial(_read_used, nvml, handle, version))
        if used is not None:
            return used
    return None


def _read_used(nvml: Any, handle: Any, version: int | None) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle, version).used)
