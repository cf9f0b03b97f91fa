# SPDX-License-Identifier: Apache-2.0
"""One named window: two moments now, joules when the counters have ticked."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.trace import NEIGHBOURS, Mark

if TYPE_CHECKING:
    from pytest_llenergy.model import record
    from pytest_llenergy.model.record import DomainEnergy, Flag

#: How long to wait for a counter to tick (seconds).
TICK_TIMEOUT_S = 1.0

FORKED = "the meters are read by the process that this one was forked from; open others here, with measure()"


class Window:
    """A stretch of time and its joules, which are known once it has ended.

    Entering and leaving only mark the time. The counters tick later; whoever first asks for joules waits
    for that, up to three ticks (``await window.settled()`` where nothing may block). ``start_s`` and
    ``duration_s`` are monotonic seconds. ``energy_j`` and its standard uncertainty ``energy_u_j`` are sums
    over ``by_domain``, or ``None`` with ``reason``. ``at_work`` tells the reader to keep out of the way
    meanwhile.
    """

    def __init__(self, name: str, sampler: Sampler, reasons: Sequence[str], *, at_work: bool = True) -> None:
        self.name = name
        self._at_work = at_work
        self._sampler = sampler
        self._reasons = reasons
        self._start_ns: int | None = None
        self._end_ns: int | None = None
        self._record: record.Window | None = None

    def __enter__(self) -> Window:
        if self._start_ns is not None:
            told = "has ended" if self.ended else f"is open already, until end({self.name!r})"
            raise MeterError(f"window {self.name!r} {told}; make a new one with window({self.name!r})")
        synchronize()
        self._sampler.read_now()
        self._start_ns = time.monotonic_ns()
        self._sampler.marks.append(Mark(self._start_ns, begins=True))
        if self._at_work:
            self._sampler.work_begins()
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
            synchronize()
        except Exception:
            # What the GPU reports late; the error of the work itself says more.
            if error is None:
                raise
        finally:
            # Reading may have to wait for a driver that is slow to answer; the window has ended by then.
            self._end_ns = time.monotonic_ns()
            self._sampler.marks.append(Mark(self._end_ns, begins=False))
            if self._at_work:
                self._sampler.work_ends()
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
        from pytest_llenergy.meters.beside import in_thread

        await in_thread(lambda: self.record)
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
            from pytest_llenergy.meters.closing import close

            fork = self._sampler.is_fork()
            self._sampler.await_ticks(self._end_ns, TICK_TIMEOUT_S, NEIGHBOURS)
            series, reasons = ([], [FORKED]) if fork else (self._sampler.series, self._reasons)
            marks = self._sampler.marks
            self._record = close(self.name, series, self._start_ns, self._end_ns, reasons, marks)
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


def synchronize() -> None:
    """Wait for what this process has queued on its GPUs: it belongs to the window that queued it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()
