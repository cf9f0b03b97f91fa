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

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from pytest_llenergy.devices.inventory import boards
from pytest_llenergy.devices.visibility import visible_uuids
from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.flags import trace_flags
from pytest_llenergy.meters.protocol import Targets
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection, known_meters, open_meters
from pytest_llenergy.meters.totals import absolute_u_j, add, stored
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.windows import Energy, energy_between, resolvable
from pytest_llenergy.model import record
from pytest_llenergy.model.record import DomainEnergy, Flag

#: How long to wait for a counter to tick (seconds).
TICK_TIMEOUT_S = 1.0


class Window:
    """A stretch of time and its joules, which are known once it has ended.

    Entering and leaving only mark the time. The counters tick later; whoever first asks for joules waits
    for that, up to a tick (``await window.settled()`` where nothing may block). ``start_s`` and
    ``duration_s`` are monotonic seconds. ``energy_j`` and its standard uncertainty ``energy_u_j`` are sums
    over ``by_domain``, or ``None`` with ``reason``.
    """

    def __init__(self, name: str, sampler: Sampler, reasons: Sequence[str]) -> None:
        self.name = name
        self._sampler = sampler
        self._reasons = reasons
        self._start_ns: int | None = None
        self._end_ns: int | None = None
        self._record: record.Window | None = None

    def __enter__(self) -> Window:
        if self._start_ns is not None:
            raise MeterError(f"window {self.name!r} was entered twice; make a new one")
        _synchronize()
        self._sampler.read_now()
        self._start_ns = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _synchronize()
        # Reading may have to wait for a driver that is slow to answer; the window has ended by then.
        self._end_ns = time.monotonic_ns()
        self._sampler.read_now()

    async def __aenter__(self) -> Window:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    async def settled(self) -> Window:
        """Wait for the counters without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.record)
        return self

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return self._end_ns is not None

    @property
    def record(self) -> record.Window:
        """The window as stored. Raises ``MeterError`` while it is open."""
        if self._start_ns is None or self._end_ns is None:
            raise MeterError(f"window {self.name!r} has not ended; read it after the with block")
        if self._record is None:
            self._sampler.await_tick(self._end_ns, TICK_TIMEOUT_S)
            self._record = _close(
                self.name, self._sampler.series, self._start_ns, self._end_ns, self._reasons
            )
        return self._record

    @property
    def start_s(self) -> float:
        """Start, monotonic seconds."""
        return self.record.start_s

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.record.duration_s

    @property
    def energy_j(self) -> float | None:
        """Joules of all domains."""
        return self.record.energy_j

    @property
    def energy_u_j(self) -> float | None:
        """Standard uncertainty of ``energy_j``, for comparing on the same devices."""
        return self.record.energy_u_j

    @property
    def energy_u_absolute_j(self) -> float | None:
        """Standard uncertainty of ``energy_j``, accuracy of the sources included."""
        return self.record.energy_u_absolute_j

    @property
    def reason(self) -> str | None:
        """Why there are no joules."""
        return self.record.reason

    @property
    def by_domain(self) -> dict[str, DomainEnergy]:
        """Each domain by name."""
        return self.record.by_domain

    @property
    def flags(self) -> list[Flag]:
        """What to know about the numbers."""
        return self.record.flags


class Measuring:
    """Open meters and the windows measured with them. Windows may nest and overlap.

    A context manager, plain or async; ``total`` is the window of the whole block.
    """

    def __init__(self, selection: Selection) -> None:
        self.reasons = selection.reasons
        self.windows: list[Window] = []
        self._sampler = Sampler(selection.meters)
        self._open: dict[str, Window] = {}
        self.total = Window("total", self._sampler, self.reasons)

    @property
    def series(self) -> list[Series]:
        """What the meters said so far, one series a domain."""
        return self._sampler.series

    def start(self) -> None:
        """Begin to read. Waits for the first tick of every counter: its first value may be old."""
        self._sampler.__enter__()
        self._sampler.await_tick(0, TICK_TIMEOUT_S)

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
        await asyncio.get_running_loop().run_in_executor(None, self.start)
        self.total.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.total.__exit__(kind, error, traceback)
        await asyncio.get_running_loop().run_in_executor(None, self.stop)


def measure(
    gpus: Sequence[str] | None = None, meters: Sequence[str] = (), *, require_measured: bool = False
) -> Measuring:
    """Measure a block of a script: ``with measure() as energy: ...; energy.total.energy_j``.

    ``gpus`` are full UUIDs; by default those that ``CUDA_VISIBLE_DEVICES`` allows, and the CPU where that
    is none. ``meters`` are names as in ``--energy-meter``. Raises ``MeterError`` with every reason when
    nothing can be read, or nothing that measures with ``require_measured``.
    """
    if gpus is None:
        gpus = visible_uuids(os.environ, [board.uuid for board in boards()])
    targets = Targets(tuple(gpus))
    return Measuring(open_meters(meters, known_meters(), targets, require_measured=require_measured))


def _synchronize() -> None:
    """Wait for what this process has queued on its GPUs: it belongs to the window that queued it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()


def _close(
    name: str, trace: Sequence[Series], start_ns: int, end_ns: int, reasons: Sequence[str]
) -> record.Window:
    energies = {series.domain.name: _domain(series, start_ns, end_ns) for series in trace}
    by_domain = {
        series.domain.name: stored(energies[series.domain.name], series, (end_ns - start_ns) / 1e9)
        for series in trace
    }
    total = add(list(energies.values()), reasons)
    flags = trace_flags(trace, start_ns, end_ns)
    if total.energy_j is None:
        flags.insert(0, Flag(name="unmeasured", severity="warning", detail=total.reason or "no reading"))
    return record.Window(
        name=name,
        start_s=start_ns / 1e9,
        duration_s=(end_ns - start_ns) / 1e9,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=absolute_u_j(total, list(by_domain.values())),
        by_domain=by_domain,
        flags=flags,
        reason=total.reason,
    )


def _domain(series: Series, start_ns: int, end_ns: int) -> Energy:
    return resolvable(energy_between(series, start_ns, end_ns), series, (end_ns - start_ns) / 1e9)
