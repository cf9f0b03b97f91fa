# SPDX-License-Identifier: Apache-2.0
"""NVML, initialised: the one place that opens it, finds boards and turns its return codes into words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from warnings import catch_warnings, simplefilter

from pytest_llenergy.errors import DeviceError, NoDriverError

T = TypeVar("T")

#: A fork copies the locks of the driver's library as they are at that moment. One that another thread holds
#: then is never released in the child, so a session is of no use there.
FORK_MESSAGE = "NVML was opened before a fork; only the process that opened it can use it"

#: The member of ``nvmlValue_t`` that holds a value, by ``nvmlValueType_t`` (nvml.h).
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def read_or_none(module: Any, read: Callable[[], T]) -> T | None:
    """What NVML tells, or ``None`` where it does not."""
    try:
        return read()
    except module.NVMLError:
        return None


class BoardHandle(NamedTuple):
    """An open board. ``asked`` is the UUID that it was asked for by, ``device`` what that names.

    That is another than the board itself where it is one of its MIG instances: the board is ``shared`` then.
    """

    uuid: str
    name: str
    handle: Any
    lookup_uuid: str
    device: Any

    @property
    def shared(self) -> bool:
        """Whether it is a board of several instances."""
        return self.lookup_uuid != self.uuid


class Quantity(NamedTuple):
    """One number that NVML tells of a board, in thousandths of J or W.

    It is a field with its scope (0 board, 1 module: ``NVML_POWER_SCOPE_*``), or a function of its own.
    """

    name: str
    scope: str = "board"
    field: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """The name, and the scope where it is not the board's."""
        return self.name if self.scope == "board" else f"{self.name} of the {self.scope}"


class Session:
    """NVML from construction to ``close``. It counts how often it is initialised: sessions may overlap.

    It belongs to the process that opened it; in a child forked from that it gives a reason for values.

    Raises ``NoDriverError``, or ``DeviceError`` for a driver that is there and refuses.
    """

    def __init__(self) -> None:
        try:
            # Of the package pynvml, which others bring along, that it is not the one to use. Where warnings
            # are errors the report of a run would be lost to it.
            with catch_warnings():
                simplefilter("ignore", FutureWarning)
                import pynvml
        except ImportError:
            raise NoDriverError("NVML: the module pynvml is missing; pip install nvidia-ml-py") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound as error:
            raise NoDriverError(f"NVML: {error}; install the NVIDIA driver") from None
        except pynvml.NVMLError_DriverNotLoaded as error:
            raise NoDriverError(f"NVML: {error}; load the NVIDIA kernel module") from None
        except pynvml.NVMLError as error:
            # A driver that is there and does not answer is not the same as no GPU.
            raise DeviceError(f"NVML: {error}; see nvidia-smi") from None
        self.module: Any = pynvml
        self._owner = os.getpid()

    def close(self) -> None:
        """Give NVML back."""
        if os.getpid() != self._owner:
            return
        with suppress(self.module.NVMLError):
            self.module.nvmlShutdown()

    def open_board(self, uuid: str) -> BoardHandle:
        """The board with this UUID, or the board on which the MIG instance with this UUID lives.

        Raises ``DeviceError`` naming the UUID and what the driver said.
        """
        try:
            device = handle = self.module.nvmlDeviceGetHandleByUUID(uuid)
            if self._is_mig(device):
                handle = self.module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
            own = str(self.module.nvmlDeviceGetUUID(handle))
            return BoardHandle(own, str(self.module.nvmlDeviceGetName(handle)), handle, uuid, device)
        except self.module.NVMLError as error:
            raise DeviceError(f"NVML: {uuid} does not answer ({error}); see nvidia-smi -L") from None

    def _is_mig(self, handle: Any) -> bool:
        try:
            answer = self.module.nvmlDeviceIsMigDeviceHandle(handle)
            # pynvml hands out the C integer itself, which is true whatever it holds.
            return bool(getattr(answer, "value", answer))
        except self.module.NVMLError:
            # Drivers and boards that know nothing of MIG.
            return False

    def read_fields(self, handle: Any, codes: Sequence[tuple[int, int]]) -> list[float | str]:
        """Field values by (field, scope) in one call; what the driver said for each that has none."""
        if os.getpid() != self._owner:
            return [FORK_MESSAGE] * len(codes)
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
        """Each quantity in J or W, or what the driver said; in one call where all of them are fields."""
        codes = [quantity.field for quantity in quantities if quantity.field is not None]
        if len(codes) == len(quantities):
            raw = self.read_fields(handle, codes)
        else:
            raw = [self._raw(handle, quantity) for quantity in quantities]
        return [value if isinstance(value, str) else value / 1000 for value in raw]

    def make_reader(self, handle: Any, quantity: Quantity) -> Callable[[], float | str]:
        """``read`` of one quantity, with everything prepared that is the same each time.

        A background reader finds cold caches: what it touches costs more than what it computes.
        """
        if quantity.field is None:
            return lambda: self.read(handle, (quantity,))[0]
        module, owner = self.module, self._owner
        values = (module.c_nvmlFieldValue_t * 1)()
        value = values[0]
        value.fieldId, value.scopeId = quantity.field
        function, union = module.nvmlLib.nvmlDeviceGetFieldValues, value.value

        def read() -> float | str:
            if os.getpid() != owner:
                return FORK_MESSAGE
            result = function(handle, 1, values) or value.nvmlReturn
            if result:
                return str(module.NVMLError(result))
            return float(getattr(union, VALUE_MEMBERS[value.valueType])) / 1000

        return read

    def _raw(self, handle: Any, quantity: Quantity) -> float | str:
        if quantity.field is not None:
            return self.read_fields(handle, (quantity.field,))[0]
        if os.getpid() != self._owner:
            return FORK_MESSAGE
        try:
            return float(getattr(self.module, quantity.name)(handle))
        except self.module.NVMLError as error:
            return str(error)
