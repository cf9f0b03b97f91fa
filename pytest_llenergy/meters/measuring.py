# SPDX-License-Identifier: Apache-2.0
"""Named windows in this process, for tests and for plain scripts.

from pytest_llenergy.meters import measure

with measure() as energy:
    with energy.window("load"):
        load()
    energy.begin("generate")
    generate()
    print(energy.end("generate").energy_j)
print(energy.total.energy_j, "±", energy.total.energy_u_j)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from types import TracebackType

from pytest_llenergy.errors import DeviceError, MeterError
from pytest_llenergy.meters.known import KnownMeters
from pytest_llenergy.meters.protocol import Targets
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection, open_meters
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.window import TICK_TIMEOUT_S, Window


class Measuring:
    """Open meters and the windows measured with them. Windows may nest and overlap.

    A context manager, plain or async; ``total`` is the window of the whole block.
    """

    def __init__(self, selection: Selection) -> None:
        self.reasons: tuple[str, ...] = selection.reasons
        self.windows: list[Window] = []
        self._sampler = Sampler(selection.meters)
        self._open: dict[str, Window] = {}
        # It is open between the windows too, where the ticks beside them matter.
        self.total: Window = Window("total", self._sampler, self.reasons, at_work=False)

    @property
    def series(self) -> list[Series]:
        """What the meters said so far, one series a domain."""
        return self._sampler.series

    def start(self) -> None:
        """Begin to read. Waits for the first tick of every counter: its first value may be old."""
        self._sampler.__enter__()
        # Loaded while the ticks come, so that no window that is still open pays for it.
        import_module("pytest_llenergy.meters.closing")
        self._sampler.await_ticks(0, TICK_TIMEOUT_S)

    def stop(self) -> None:
        """Wait for the last ticks, then close the meters. Windows left open stay without numbers."""
        for window in [*self.windows, self.total]:
            if window.ended:
                _ = window.record
        self._sampler.__exit__(None, None, None)

    def window(self, name: str) -> Window:
        """A new window, for ``with`` or ``async with``."""
        window = Window(name, self._sampler, self.reasons)
        self.windows.append(window)
        return window

    def begin(self, name: str) -> Window:
        """Open a window by name. Raises ``MeterError`` when one of that name is open."""
        if name in self._open:
            raise MeterError(f"window {name!r} is open already; end it first, or give another name")
        window = self._open[name] = self.window(name).__enter__()
        return window

    def end(self, name: str) -> Window:
        """Close the window of that name. Raises ``MeterError`` when there is none."""
        if name not in self._open:
            are = ", ".join(map(repr, self._open)) or "none"
            raise MeterError(f"no window {name!r} is open; open: {are}")
        window = self._open.pop(name)
        window.__exit__(None, None, None)
        return window

    def __enter__(self) -> Measuring:
        self.start()
        self.total.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.total.__exit__(kind, error, traceback)
        self.stop()

    async def __aenter__(self) -> Measuring:
        from pytest_llenergy.meters.beside import in_thread

        await in_thread(self.start)
        self.total.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        from pytest_llenergy.meters.beside import in_thread

        self.total.__exit__(kind, error, traceback)
        await in_thread(self.stop)


def measure(
    gpus: Sequence[str] | None = None, meters: Sequence[str] = (), *, require_measured: bool = False
) -> Measuring:
    """Measure a block of a script: ``with measure() as energy: ...; energy.total.energy_j``.

    ``gpus`` are full UUIDs, none of them means the CPU; by default those that ``CUDA_VISIBLE_DEVICES``
    allows, and the CPU on a host without any. ``meters`` are names as in ``--energy-meter``.

    Raises ``MeterError`` with every reason when nothing can be read, or nothing that measures with
    ``require_measured``, or when the environment hides every GPU of the host.
    """
    targets = Targets(tuple(_visible() if gpus is None else gpus))
    return Measuring(open_meters(meters, KnownMeters(), targets, require_measured=require_measured))


def _visible() -> Sequence[str]:
    from pytest_llenergy.devices.inventory import present
    from pytest_llenergy.devices.visibility import VARIABLE, visible

    try:
        found = present()
        allowed = visible(os.environ, found)
    except DeviceError as error:
        raise MeterError(str(error)) from None
    if found.boards and not allowed.uuids:
        told = f" ({allowed.reason})" if allowed.reason else ""
        raise MeterError(
            f"{VARIABLE}={os.environ.get(VARIABLE)!r} allows no GPU{told}, and the driver shows "
            f"{len(found.boards)}; measure(gpus=()) measures the CPU, measure(gpus=[UUID]) what it names"
        )
    # By one of its instances, so that it is known to be shared.
    return [found.parts(uuid)[0].uuid if found.parts(uuid) else uuid for uuid in allowed.uuids]
