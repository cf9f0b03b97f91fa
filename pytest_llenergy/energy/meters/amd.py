# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs: the energy accumulator that AMD SMI reads (extra ``amd``, ``--energy-meter=amd``).

The count times ``counter_resolution`` is microjoules (AMD SMI: ``amdsmi_get_energy_count``). Virtual machines
have no counter, and on some boards it stands still or belongs to two dies (ROCm/amdsmi issues 22 and 38):
there is a reason in place of energy then, as for every counter that does not tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pytest_llenergy.devices.amd_smi import import_amdsmi, is_amd, one_line, read_amd_uuid
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, unknown_accuracy
from pytest_llenergy.errors import MeterError, NoDriverError

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

    def __init__(self, library: Library, uuid: str, handle: Any) -> None:
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
                flags=accuracy.flags,
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


def open_amd(targets: Targets) -> list[AmdMeter]:
    """Open the boards of the targets, or every AMD board of this host if the targets have no GPUs.

    Raises:
        MeterError: If AMD SMI or a board of the targets is missing.
    """
    library = Library()
    try:
        return _open(library, targets.gpus)
    except MeterError:
        library.leave()
        raise


def _open(library: Library, wanted: Sequence[str]) -> list[AmdMeter]:
    boards = library.boards(wanted)
    missing = [uuid for uuid in wanted if uuid not in boards]
    if missing:
        present = ", ".join(boards) or "none"
        raise MeterError(f"amd: no board {', '.join(missing)}; found: {present}")
    if not boards:
        raise MeterError("amd: AMD SMI finds no board")
    return [AmdMeter(library, uuid, boards[uuid]) for uuid in wanted or boards]


SPEC = MeterSpec(name="amd", kind="measured", open=open_amd, by_default=False, host_wide=False)
