# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs: the energy accumulator that AMD SMI reads (extra ``amd``, ``--energy-meter=amd``).

The count times ``counter_resolution`` is microjoules (AMD SMI: ``amdsmi_get_energy_count``). Virtual machines
have no counter, and on some boards it stands still or belongs to two dies (ROCm/amdsmi issues 22 and 38),
so a board whose counter does not move is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pytest_llenergy import real_time
from pytest_llenergy.devices.amd_smi import import_amdsmi, is_amd, one_line, read_amd_uuid
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, unknown_accuracy
from pytest_llenergy.energy.timeouts import AMD_POLL_S, AMD_STILL_S
from pytest_llenergy.errors import MeterError, NoDriverError
from pytest_llenergy.record.record import Flag

MICRO = 1e-6

#: Highest power of a board (W): the largest are specified for 1,400 W.
HIGHEST_W = 3000.0


class Library:
    """The AMD SMI library, which stays open while one of its boards is open."""

    def __init__(self) -> None:
        """Initialise AMD SMI.

        Raises:
            MeterError: If the package, its library or the driver is missing.
        """
        try:
            self._smi = import_amdsmi()
        except NoDriverError as error:
            raise MeterError(f"amd: {error}") from None
        self._users = 0
        try:
            self._smi.amdsmi_init()
        except self._smi.AmdSmiException as error:
            raise MeterError(f"amd: {one_line(error)}") from None

    def boards(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Return handles by UUID: that of ROCm if the wanted boards are named so, else that of AMD SMI.

        Raises:
            MeterError: If AMD SMI fails.
        """
        smi, found = self._smi, {}
        try:
            handles = smi.amdsmi_get_processor_handles()
            if not any(map(is_amd, wanted)):
                return {str(smi.amdsmi_get_gpu_device_uuid(handle)): handle for handle in handles}
            for handle in handles:
                # One without a serial number was not leased.
                with suppress(smi.AmdSmiException, ValueError):
                    found[read_amd_uuid(smi, handle)] = handle
            return found
        except self._smi.AmdSmiException as error:
            raise MeterError(f"amd: {one_line(error)}") from None

    def count(self, handle: Any) -> tuple[float, float]:
        """Return joules since the driver was loaded, and the joules of one count.

        Raises:
            MeterError: If AMD SMI fails.
        """
        try:
            answer = self._smi.amdsmi_get_energy_count(handle)
        except self._smi.AmdSmiException as error:
            raise MeterError(f"amd: {one_line(error)}") from None
        step_j = float(answer["counter_resolution"]) * MICRO
        return int(answer["energy_accumulator"]) * step_j, step_j

    def enter(self) -> None:
        """Register an open board."""
        self._users += 1

    def leave(self) -> None:
        """Unregister a board. Shuts the library down after the last one."""
        self._users -= 1
        if self._users <= 0:
            self._smi.amdsmi_shut_down()


class AmdMeter:
    """One board."""

    name = "amd"
    poll_period_s: float = 0.01

    def __init__(self, library: Library, uuid: str, handle: Any, flags: tuple[Flag, ...] = ()) -> None:
        """Open a board.

        Raises:
            MeterError: If it has no counter.
        """
        self._library = library
        self._handle = handle
        accuracy = unknown_accuracy("AMD SMI")
        self.domains: tuple[Domain] = (
            Domain(
                name=f"gpu:{uuid}",
                kind="measured",
                source="amdsmi_get_energy_count",
                scope="board",
                resolution_j=library.count(handle)[1],
                accuracy=accuracy.words,
                limits=accuracy.limits,
                highest_w=HIGHEST_W,
                flags=(*accuracy.flags, *flags),
            ),
        )
        library.enter()

    def read(self) -> list[float | str]:
        try:
            return [self._library.count(self._handle)[0]]
        except MeterError as error:
            return [str(error)]

    def close(self) -> None:
        self._library.leave()


def open_amd(targets: Targets, pause: Callable[[float], None] = real_time.sleep) -> list[AmdMeter]:
    """Open the boards of the targets, or every AMD board of this host if the targets have no GPUs.

    Raises:
        MeterError: If AMD SMI or a board of the targets is missing, or no counter moves.
    """
    library = Library()
    try:
        return _open(library, targets.gpus, pause)
    except MeterError:
        library.leave()
        raise


def _open(library: Library, wanted: Sequence[str], pause: Callable[[float], None]) -> list[AmdMeter]:
    boards = library.boards(wanted)
    missing = [uuid for uuid in wanted if uuid not in boards]
    if missing:
        present = ", ".join(boards) or "none"
        raise MeterError(f"amd: no board {', '.join(missing)}; found: {present}")
    if not boards:
        raise MeterError("amd: AMD SMI finds no board")
    chosen = {uuid: boards[uuid] for uuid in wanted or boards}
    still = _select_unmoving(library, chosen, pause)
    if still and (wanted or len(still) == len(chosen)):
        raise MeterError(f"amd: the energy counter of {', '.join(still)} stood still for {AMD_STILL_S:g} s")
    detail = f"no energy counter moves on {', '.join(still)}: not in the energy, or in that of the other die"
    flags = (Flag(name="meter", severity="warning", detail=detail),) if still else ()
    return [AmdMeter(library, uuid, chosen[uuid], flags) for uuid in chosen if uuid not in still]


def _select_unmoving(library: Library, boards: dict[str, Any], pause: Callable[[float], None]) -> list[str]:
    first = {uuid: library.count(handle)[0] for uuid, handle in boards.items()}
    still = list(boards)
    for _ in range(round(AMD_STILL_S / AMD_POLL_S)):
        pause(AMD_POLL_S)
        still = [uuid for uuid in still if library.count(boards[uuid])[0] == first[uuid]]
        if not still:
            break
    return still


SPEC = MeterSpec(name="amd", kind="measured", open=open_amd, by_default=False, host_wide=False)
