# SPDX-License-Identifier: Apache-2.0
"""Named windows in this process, for tests (``energy_meter``) and for plain scripts.

from pytest_llenergy.energy import measure

with measure() as energy:
    with energy.window("load"):
        load()
    energy.begin("generate")
    generate()
    print(energy.end("generate"))
print(energy.total.energy_j, "±", energy.total.energy_u_j)
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pytest_llenergy import real_time
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.energy.window_meters import LocalWindows, WindowMeters
from pytest_llenergy.errors import DeviceError, MeterError

if TYPE_CHECKING:
    from pytest_llenergy.record import record
    from pytest_llenergy.record.record import DomainEnergy, Flag, MeterInfo

_numbers = itertools.count()


class Window:
    """A stretch of time and its joules, which are available once it has ended.

    Entering and leaving only record the time. The counters tick later: the first access to a result waits for
    up to three ticks; use ``await window.settled()`` in an event loop. ``start_s`` and ``duration_s`` are
    monotonic seconds. ``energy_j`` and its standard uncertainty ``energy_u_j`` are sums over ``by_domain``.
    Without joules, ``reason`` says why, and both raise ``MeterError`` with it; ``window.record`` has ``None``
    there, as JSON has ``null``. With ``at_work``, meters are read rarely while the window is open.
    """

    def __init__(self, name: str, hosts: Sequence[WindowMeters], *, at_work: bool = True) -> None:
        self.name = name
        self._at_work = at_work
        # The window of a whole block says nothing about the windows in it.
        self._mark_name = name if at_work else ""
        self._hosts = hosts
        self._number = next(_numbers)
        self._start_ns: int | None = None
        self._end_ns: int | None = None
        self._record: record.WindowRecord | None = None

    def __enter__(self) -> Window:
        if self._start_ns is not None:
            state = "has ended" if self.ended else f"is open already, until end({self.name!r})"
            raise MeterError(f"window {self.name!r} {state}; make a new one with window({self.name!r})")
        synchronize_gpus()
        # All of them first, so that no host reads its meters long before the window begins.
        for wait in [host.compare_clocks(self._number) for host in self._hosts]:
            wait()
        for wait in [host.prepare(self._number) for host in self._hosts]:
            wait()
        self._start_ns = real_time.monotonic_ns()
        for host in self._hosts:
            host.begin(self._number, self._start_ns, self._mark_name, at_work=self._at_work)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._start_ns is None or self._end_ns is not None:
            raise MeterError(f"window {self.name!r} is not open; enter it first, and leave it once")
        try:
            synchronize_gpus()
        except Exception:
            # An asynchronous error of the GPU must not hide the error of the work itself.
            if error is None:
                raise
        finally:
            # Set the end first: a driver may be slow to answer.
            self._end_ns = real_time.monotonic_ns()
            ending = [
                host.end(self._number, self._end_ns, self._mark_name, at_work=self._at_work)
                for host in self._hosts
            ]
            for wait in ending:
                wait()

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
        await run_in_thread(lambda: self.record)
        return self

    @property
    def ended(self) -> bool:
        """Whether the window has ended."""
        return self._end_ns is not None

    @property
    def record(self) -> record.WindowRecord:
        """The window as a record.

        Raises:
            MeterError: If the window is still open.
        """
        if self._start_ns is None or self._end_ns is None:
            raise MeterError(f"window {self.name!r} has not ended; read it after the with block")
        if self._record is None:
            from pytest_llenergy.energy.host_window import window_record

            found = [host.account_window(self._number, self._start_ns, self._end_ns) for host in self._hosts]
            self._record = window_record(self.name, self._start_ns, self._end_ns, [wait() for wait in found])
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
    def energy_j(self) -> float:
        """Joules of all domains.

        Raises:
            MeterError: The window has no joules, or has not ended.
        """
        __tracebackhide__ = True
        return self._value("energy_j")

    @property
    def energy_u_j(self) -> float:
        """Standard uncertainty of ``energy_j`` for comparisons on the same devices.

        Raises:
            MeterError: The window has no joules, or has not ended.
        """
        __tracebackhide__ = True
        return self._value("energy_u_j")

    @property
    def energy_u_absolute_j(self) -> float:
        """Standard uncertainty of ``energy_j`` that includes the accuracy of the sources.

        Raises:
            MeterError: The window has no joules, or has not ended.
        """
        __tracebackhide__ = True
        return self._value("energy_u_absolute_j")

    def _value(self, name: str) -> float:
        __tracebackhide__ = True
        value: float | None = getattr(self.record, name)
        if value is None:
            raise MeterError(f"window {self.name!r}: {name} has no value: {self.record.reason}")
        return value

    @property
    def reason(self) -> str | None:
        """Why the window has no joules; ``None`` if it has."""
        return self.record.reason

    def __repr__(self) -> str:
        if not self.ended:
            return f"<Window {self.name!r}: {'not begun' if self._start_ns is None else 'open'}>"
        try:
            found = self.record
        except Exception as error:
            return f"<Window {self.name!r}: {type(error).__name__}: {error}>"
        if found.energy_j is None:
            return f"<Window {self.name!r}: no joules in {found.duration_s:.3g} s: {found.reason}>"
        from pytest_llenergy.record.quantity import format_quantity

        joules = format_quantity(found.energy_j, found.energy_u_absolute_j, "J")
        kinds = " and ".join(sorted({each.kind for each in found.by_domain.values()}))
        return f"<Window {self.name!r}: {joules} in {found.duration_s:.3g} s, {kinds}>"

    @property
    def by_domain(self) -> dict[str, DomainEnergy]:
        """Energy of each domain, by name."""
        return self.record.by_domain

    @property
    def flags(self) -> list[Flag]:
        """Flags: what a reader must know about the numbers."""
        return self.record.flags


def synchronize_gpus() -> None:
    """Wait for the work that this process has queued on its GPUs, which belongs to the current window."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()


class Measuring:
    """The open meters of one or several hosts, and windows measured with them. Windows may nest and overlap.

    This is a context manager; ``total`` is the window of the whole block.
    """

    def __init__(self, hosts: Sequence[WindowMeters], kind: type[Window] = Window) -> None:
        self.windows: list[Window] = []
        self._kind = kind
        self.reasons: tuple[str, ...] = tuple(reason for host in hosts for reason in host.reasons)
        self._hosts = hosts
        self._open: dict[str, Window] = {}
        # Not at work: it is also open between the windows, where ticks must be read closely.
        self.total: Window = Window("total", hosts, at_work=False)

    def infos(self) -> list[MeterInfo]:
        """Return the entry of each domain in a record."""
        return [info for host in self._hosts for info in host.infos()]

    def start(self) -> None:
        """Start the readings and wait for the first tick of every counter, whose first value may be old."""
        for wait in [host.start() for host in self._hosts]:
            wait()

    def stop(self) -> None:
        """Wait for the last ticks, then close the meters. Windows that are still open get no result."""
        for window in [*self.windows, self.total]:
            if window.ended:
                _ = window.record
        for host in self._hosts:
            host.stop()

    def window(self, name: str) -> Window:
        """Return a new window, for ``with`` or ``async with``."""
        window = self._kind(name, self._hosts)
        self.windows.append(window)
        return window

    def begin(self, name: str) -> Window:
        """Open a window by name.

        Raises:
            MeterError: If a window of that name is open.
        """
        if name in self._open:
            raise MeterError(f"window {name!r} is open already; end it first, or give another name")
        window = self._open[name] = self.window(name).__enter__()
        return window

    def end(self, name: str) -> Window:
        """Close the window of that name.

        Raises:
            MeterError: If no such window is open.
        """
        if name not in self._open:
            names = ", ".join(map(repr, self._open)) or "none"
            raise MeterError(f"no window {name!r} is open; open: {names}")
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
        try:
            self.total.__exit__(kind, error, traceback)
        finally:
            self.stop()


def measure(
    gpus: Sequence[str] | None = None, meters: Sequence[str] = (), *, require_measured: bool = False
) -> Measuring:
    """Measure a block of a script: ``with measure() as energy: ...; energy.total.energy_j``.

    Args:
        gpus: Full UUIDs; empty measures the CPU. The default is the GPUs that ``CUDA_VISIBLE_DEVICES``
            allows, or the CPU on a host without GPUs.
        meters: Names as in ``--energy-meter``.
        require_measured: Whether estimates are not accepted.

    Raises:
        MeterError: No acceptable meter can be read, or the environment hides every GPU.
    """
    targets = Targets(tuple(_visible() if gpus is None else gpus))
    selection = open_meters(meters, MeterRegistry(), targets, require_measured=require_measured)
    return Measuring([LocalWindows(selection)])


def _visible() -> Sequence[str]:
    from pytest_llenergy.devices.inventory import read_inventory
    from pytest_llenergy.devices.visibility import describe_settings, parse_visible_devices

    try:
        inventory = read_inventory()
        allowed = parse_visible_devices(os.environ, inventory)
    except DeviceError as error:
        raise MeterError(str(error)) from None
    if inventory.boards and not allowed.uuids:
        reason = f" ({allowed.reason})" if allowed.reason else ""
        raise MeterError(
            f"{describe_settings(os.environ, inventory)} allows no GPU{reason}, and the driver shows "
            f"{len(inventory.boards)}; measure(gpus=()) measures the CPU, measure(gpus=[UUID]) the "
            "named GPUs"
        )
    return inventory.one_per_board(allowed.uuids)


async def run_in_thread(function: Callable[[], object]) -> None:
    """Call a blocking function in a thread, so that the event loop of asyncio or trio keeps running."""
    trio: Any = sys.modules.get("trio")
    if trio is not None and _is_running(trio):
        await trio.to_thread.run_sync(function)
        return
    import asyncio

    await asyncio.get_running_loop().run_in_executor(None, function)


def _is_running(trio: Any) -> bool:
    # trio is tried first, since a loop of asyncio may run around it.
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
