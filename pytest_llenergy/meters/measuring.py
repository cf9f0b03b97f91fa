# SPDX-License-Identifier: Apache-2.0
"""Named windows in this process: ``with energy_meter("load") as window: ...``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType

from pytest_llenergy.errors import MeterError
from pytest_llenergy.measure import windows
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model import record
from pytest_llenergy.model.record import DomainEnergy, Flag

#: How long to wait for a counter to tick (seconds).
TICK_TIMEOUT_S = 1.0


class Window:
    """A stretch of time and its joules, known once it has ended.

    ``start_s`` and ``duration_s`` are monotonic seconds. ``energy_j`` and its standard uncertainty
    ``energy_u_j`` are sums over ``by_domain``, or ``None`` with ``reason``.
    """

    def __init__(self, name: str, sampler: Sampler, reasons: Sequence[str]) -> None:
        self.name = name
        self._sampler = sampler
        self._reasons = reasons
        self._start_ns: int | None = None
        self._record: record.Window | None = None

    def __enter__(self) -> Window:
        # The first reading of a counter does not say when it last ticked.
        _await_ticks(self._sampler, 0)
        self._start_ns = self._sampler.read_now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = self._sampler.read_now()
        assert self._start_ns is not None
        _await_ticks(self._sampler, end_ns)
        self._record = _close(self.name, self._sampler.series, self._start_ns, end_ns, self._reasons)

    async def __aenter__(self) -> Window:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    @property
    def record(self) -> record.Window:
        """The window as stored. Raises ``MeterError`` while it is open."""
        if self._record is None:
            raise MeterError(f"window {self.name!r} has not ended; read it after the with block")
        return self._record

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return self._record is not None

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
        """Standard uncertainty of ``energy_j``."""
        return self.record.energy_u_j

    @property
    def by_domain(self) -> dict[str, DomainEnergy]:
        """Each domain by name."""
        return self.record.by_domain

    @property
    def flags(self) -> list[Flag]:
        """What to know about the numbers."""
        return self.record.flags


def _await_ticks(sampler: Sampler, after_ns: int) -> None:
    """Sleep until every counter has ticked after a moment, or does not within a second."""
    deadline = time.monotonic() + TICK_TIMEOUT_S
    while time.monotonic() < deadline:
        if all(series.reason or series.after(after_ns) for series in sampler.series):
            return
        time.sleep(0.01)


def _close(
    name: str, trace: Sequence[Series], start_ns: int, end_ns: int, reasons: Sequence[str]
) -> record.Window:
    by_domain: dict[str, DomainEnergy] = {}
    flags: list[Flag] = []
    for series in trace:
        by_domain[series.domain.name] = _domain(series, start_ns, end_ns)
    missing = [each.reason for each in by_domain.values() if each.energy_j is None]
    reason = None
    if missing or not by_domain:
        reason = missing[0] if missing else "; ".join(reasons) or "no meter was open"
        flags.append(Flag(name="unmeasured", severity="warning", detail=reason or "no reading"))
    energies = [each.energy_j for each in by_domain.values() if each.energy_j is not None]
    limits = sum(((each.high_j or 0.0) - (each.low_j or 0.0)) ** 2 / 12 for each in by_domain.values())
    variance = sum((each.energy_u_j or 0.0) ** 2 for each in by_domain.values())
    return record.Window(
        name=name,
        start_s=start_ns / 1e9,
        duration_s=(end_ns - start_ns) / 1e9,
        energy_j=None if reason else sum(energies),
        energy_u_j=None if reason else math.sqrt(variance),
        energy_u_absolute_j=None if reason else math.sqrt(variance + limits),
        by_domain=by_domain,
        flags=flags,
        reason=reason,
    )


def _domain(series: Series, start_ns: int, end_ns: int) -> DomainEnergy:
    duration_s = (end_ns - start_ns) / 1e9
    first, last = series.before(start_ns), series.after(end_ns)
    wide = (first.earliest_ns if first else start_ns), (last.latest_ns if last else end_ns)
    highest_w, lowest_w = windows.powers(series, *wide)
    # One step between ticks says nothing about how power moves within it.
    lowest_w = lowest_w if lowest_w < highest_w else 0.0
    start = windows.inside(series, start_ns, highest_w, lowest_w)
    end = windows.inside(series, end_ns, highest_w, lowest_w)
    energy = windows.between(start, end, series)
    tick_s = series.tick_period_s
    if energy.energy_j is not None and tick_s is not None and duration_s < min(tick_s, 1.0) / 10:
        reason = f"not resolvable: {duration_s * 1e3:.3g} ms window, {tick_s * 1e3:.3g} ms tick"
        return DomainEnergy(energy_j=None, energy_u_j=None, kind=series.domain.kind, reason=reason)
    low_j = high_j = None
    if energy.energy_j is not None:
        low_j, high_j = series.domain.limits(energy.energy_j, duration_s)
    return DomainEnergy(
        energy_j=energy.energy_j,
        energy_u_j=energy.u_j,
        kind=series.domain.kind,
        reason=energy.reason,
        low_j=low_j,
        high_j=high_j,
    )
