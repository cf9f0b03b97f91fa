# SPDX-License-Identifier: Apache-2.0
"""The meters of one host, as windows use them: of this host, read in this process, or of another one."""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.sampler import Sampler
from pytest_llenergy.energy.timeouts import TICK_TIMEOUT_S
from pytest_llenergy.energy.trace import NEIGHBOURS, Mark, Series

if TYPE_CHECKING:
    from pytest_llenergy.energy.attribution import CpuReading, CpuUse
    from pytest_llenergy.energy.cpu_time import ProcessTree
    from pytest_llenergy.energy.host_window import HostWindow
    from pytest_llenergy.record.record import MeterInfo


class WindowMeters(Protocol):
    """The meters of one host. All moments are monotonic nanoseconds of this process.

    A window has a number and calls ``compare_clocks``, ``prepare``, ``begin``, ``end`` and ``account_window``
    in this order. Functions that these return wait until the host is done, so that several hosts work at the
    same time. Without ``at_work`` the meters are not read more rarely during the window.
    """

    @property
    def reasons(self) -> Sequence[str]:
        """Why meters could not be opened, or no longer answer."""

    def start(self) -> Callable[[], object]:
        """Start the readings and wait for the first tick of every counter, whose first value may be old."""

    def stop(self) -> None:
        """Close the meters."""

    def infos(self) -> Sequence[MeterInfo]:
        """Return the entry of each domain in the record."""

    def compare_clocks(self, window: int) -> Callable[[], object]:
        """Compare the clock of the host with that of this process, on which the window will be marked."""

    def prepare(self, window: int) -> Callable[[], object]:
        """Read what must be read right before a window."""

    def begin(self, window: int, time_ns: int, name: str, *, at_work: bool) -> None:
        """Note the moment at which a window has begun."""

    def end(self, window: int, time_ns: int, name: str, *, at_work: bool) -> Callable[[], object]:
        """Note the moment at which a window has ended."""

    def account_window(self, window: int, start_ns: int, end_ns: int) -> Callable[[], HostWindow]:
        """Compute the energies of a window that has ended, once the counters have ticked."""


class LocalWindows:
    """The ``WindowMeters`` of this host."""

    def __init__(self, selection: Selection) -> None:
        self.reasons: Sequence[str] = selection.reasons
        self._roots = selection.processes
        self._sampler = Sampler(selection.meters)
        self._splits = any(series.domain.cpu_ratio is not None for series in self.series)
        self._processes: ProcessTree | None = None
        self._cpu_lock = threading.Lock()
        self._cpu_before: dict[int, CpuReading] = {}
        #: Kept, since the energy of a window may be computed twice.
        self._cpu: dict[int, CpuUse] = {}

    @property
    def series(self) -> list[Series]:
        """The trace so far, one series for each domain."""
        return self._sampler.series

    def start(self) -> Callable[[], object]:
        self._sampler.__enter__()
        # Imported before a window is open, so that none contains the energy of the import.
        import_module("pytest_llenergy.energy.host_window")
        if any(series.domain.max_age_s is None for series in self.series):
            import_module("numpy")
        self._sampler.await_ticks(0, TICK_TIMEOUT_S)
        return _done

    def stop(self) -> None:
        self._sampler.__exit__(None, None, None)
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def infos(self) -> Sequence[MeterInfo]:
        return [series.domain.info(series.meter) for series in self.series]

    def compare_clocks(self, window: int) -> Callable[[], object]:
        return _done

    def prepare(self, window: int) -> Callable[[], object]:
        if self._splits:
            self._cpu_before[window] = self._read_cpu()
        self._sampler.read_now()
        return _done

    def begin(self, window: int, time_ns: int, name: str, *, at_work: bool) -> None:
        self._sampler.marks.append(Mark(time_ns, begins=True, name=name))
        if at_work:
            self._sampler.begin_work(window=True)

    def end(self, window: int, time_ns: int, name: str, *, at_work: bool) -> Callable[[], object]:
        self.mark_end(time_ns, name)
        return self.end_work(window, at_work=at_work)

    def mark_end(self, time_ns: int, name: str) -> None:
        """Note when a window ended. Other windows may have begun since."""
        insort(self._sampler.marks, Mark(time_ns, begins=False, name=name), key=attrgetter("time_ns"))

    def end_work(self, window: int, *, at_work: bool) -> Callable[[], object]:
        """Do what ``end`` does, without the moment."""
        if at_work:
            self._sampler.end_work(window=True)
        self._sampler.read_now()
        before = self._cpu_before.pop(window, None)
        if before is not None:
            self._cpu[window] = before.until(self._read_cpu())
        return _done

    def account_window(
        self, window: int, start_ns: int, end_ns: int, *, clock_u_ns: float = 0.0
    ) -> Callable[[], HostWindow]:
        """See ``WindowMeters``. ``clock_u_ns`` is the standard uncertainty of both moments."""
        from pytest_llenergy.energy.host_window import account_window

        self._sampler.await_ticks(end_ns, TICK_TIMEOUT_S, NEIGHBOURS)
        use, marks = self._cpu.get(window), self._sampler.marks
        return partial(account_window, self.series, start_ns, end_ns, self.reasons, marks, use, clock_u_ns)

    def _read_cpu(self) -> CpuReading:
        from pytest_llenergy.energy.attribution import read_cpu
        from pytest_llenergy.energy.cpu_time import ProcessTree

        # Windows may open and close in several threads.
        with self._cpu_lock:
            if self._processes is None:
                self._processes = ProcessTree({os.getpid(), *self._roots})
            return read_cpu(self._processes)


def _done() -> None:
    """Return at once: this host is done."""
