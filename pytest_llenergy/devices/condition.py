# SPDX-License-Identifier: Apache-2.0
"""The condition of a board at work: temperature, clock, throttling, and its processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pytest_llenergy.devices.nvml import BoardHandle, Session, read_or_none, read_text
from pytest_llenergy.devices.processes import BoardProcess, list_processes, sees_all_pids

#: Fields that count the nanoseconds for which a clock was reduced, by reason (nvml.h).
THROTTLE_FIELDS = {
    "power-cap": 74,
    "sync-boost": 76,
    "thermal-software": 269,
    "thermal-hardware": 270,
    "power-brake": 271,
}


@dataclass(frozen=True)
class Condition:
    """The condition of a board at one moment.

    Values that the driver does not report are None, or missing from ``throttled_s``, which counts seconds of
    throttling by reason since an arbitrary moment, so that only differences are meaningful.
    """

    temperature_c: float | None = None
    throttled_s: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[BoardProcess, ...] | None = None


class ConditionReader:
    """Reads the condition of boards, which stay open.

    The condition of a MIG instance is that of its board, except for the processes, which are its own.

    Raises:
        DeviceError: There is no driver, or a board does not answer.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._session = Session()
        try:
            self._boards = {uuid: self._session.open_board(uuid) for uuid in uuids}
        except BaseException:
            self._session.close()
            raise

    def read(self) -> dict[str, Condition]:
        """Return the condition of each board by the UUID that was passed for it."""
        return {uuid: self._read_condition(board) for uuid, board in self._boards.items()}

    def find_others(self, pids: Collection[int]) -> list[str]:
        """Return the UUIDs of the other boards of the host that these processes use, as far as is known."""
        nvml, found = self._session.module, []
        leased = {board.uuid for board in self._boards.values()}
        count = read_or_none(nvml, nvml.nvmlDeviceGetCount) or 0
        for index in range(count) if sees_all_pids() else ():
            # A board that is lost does not answer.
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = read_text(nvml.nvmlDeviceGetUUID, handle)
                listed = list_processes(nvml, handle) or () if uuid not in leased else ()
                if any(process.pid in pids for process in listed):
                    found.append(uuid)
        return found

    def close(self) -> None:
        """Close the session; call once."""
        self._session.close()

    def _read_condition(self, board: BoardHandle) -> Condition:
        nvml, handle = self._session.module, board.handle
        counters = self._session.read_fields(handle, [(code, 0) for code in THROTTLE_FIELDS.values()])
        return Condition(
            temperature_c=read_or_none(
                nvml, lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            throttled_s={
                reason: nanoseconds / 1e9
                for reason, nanoseconds in zip(THROTTLE_FIELDS, counters, strict=True)
                if not isinstance(nanoseconds, str)
            },
            processes=list_processes(nvml, board.device),
        )
