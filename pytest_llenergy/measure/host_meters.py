# SPDX-License-Identifier: Apache-2.0
"""The meters of one host, as measuring uses them.

pytest marks when rounds begin and end. Each host keeps the trace of its counters and computes the joules of
its domains from it, so that only plain data crosses to pytest, and never a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pytest_llenergy.energy.attribution import CpuUse
from pytest_llenergy.energy.uncertainty import Power, WindowEnergy
from pytest_llenergy.measure.request_energy import RequestShares
from pytest_llenergy.record.base import EnergyKind
from pytest_llenergy.record.record import DomainEnergy, Flag, MeterInfo

if TYPE_CHECKING:
    from pytest_llenergy.measure.rounds import MeasuredRound


NO_CPU = CpuUse(0.0, 0.0, 0.0, 0.0)


class DomainFacts(msgspec.Struct, frozen=True):
    """What decides how rounds with a domain are measured.

    Attributes:
        name: Name in records.
        kind: Whether its joules are measured or estimated.
        period_s: Nominal period of the counter, else the one observed so far; 0 if unknown.
        ticks: Whether the counter stands still between its ticks.
        rests: Whether it stands still while nothing happens.
        lag_s: How long readings may lag behind a change of power.
        coverage: Share of the time in which the sensor samples.
    """

    name: str
    kind: EnergyKind
    period_s: float
    ticks: bool
    rests: bool
    lag_s: float
    coverage: float


class TickReference(NamedTuple):
    """A tick of a counter (monotonic nanoseconds), from which the phase of later moments is known."""

    time_ns: int
    period_ns: int


@dataclass(frozen=True)
class DomainRound:
    """Energy of one domain in one round: in total, by phase, and the idle power around it.

    ``record`` is the total for the record, with the limits of its source. ``requests`` are the shares of the
    round's requests, if it is to be shared.
    """

    name: str
    whole: WindowEnergy
    phases: dict[str, WindowEnergy]
    idle: Power | None
    record: DomainEnergy
    requests: RequestShares | None = None


@dataclass(frozen=True)
class HostRound:
    """What one host found in a round.

    Attributes:
        domains: Its domains; none if it has no meter.
        reasons: Why meters could not be opened.
        flags: What a reader must know of this host in this round.
        cpu: CPU use during the work.
        temperature_start_c: Temperature of the hottest board at the start.
        tick_s: Period of the slowest counter that ticks; 0 without one.
        phase: Where in a tick of that counter the round started, from 0 to 1.
    """

    domains: list[DomainRound]
    reasons: list[str]
    flags: list[Flag] = field(default_factory=list)
    cpu: CpuUse = NO_CPU
    temperature_start_c: float | None = None
    tick_s: float = 0.0
    phase: float | None = None


class HostMeters(Protocol):
    """The open meters of one host. All moments are monotonic nanoseconds of pytest's process.

    A round calls ``begin_gap``, ``prepare_work``, ``begin_work``, ``end_work`` and ``end_gap`` in this order,
    each on all hosts before the next, then ``account``. Entering starts the readings, and leaving closes the
    meters.
    """

    @property
    def reasons(self) -> Sequence[str]:
        """Why applicable meters could not be opened."""

    @property
    def load_average(self) -> float | None:
        """Load average of the host before the readings began, if known."""

    @property
    def lost(self) -> str | None:
        """Why the host is lost; ``None`` if it is not."""

    def __enter__(self) -> HostMeters: ...

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None:
        """Close the meters, which were never entered."""

    def domains(self) -> Sequence[DomainFacts]:
        """Return what is known of each domain so far."""

    def infos(self) -> Sequence[MeterInfo]:
        """Return the entry of each domain in the record."""

    def await_ticks(self, after_ns: int, timeout_s: float) -> None:
        """Wait until every counter has ticked after a moment, or until a timeout (seconds) is over."""

    def at_work(self) -> AbstractContextManager[None]:
        """Read rarely, to spare the work."""

    def tick_reference(self) -> TickReference | None:
        """Return a tick of the slowest counter; ``None`` if none ticks."""

    def begin_gap(self) -> None:
        """Begin a round: the quiet gap before the work follows."""

    def prepare_work(self) -> None:
        """Begin to end the gap, on a host that takes a while to do so."""

    def begin_work(self) -> None:
        """End the gap. The work follows at once."""

    def end_work(self) -> None:
        """Begin the quiet gap after the work, which has just ended."""

    def end_gap(self) -> int:
        """End the round. Returns when the gap ended."""

    def account(self, measured: MeasuredRound) -> Callable[[], HostRound]:
        """Begin to compute the energies of the latest round. Returns a function that waits for them."""


def account_on_all(hosts: Sequence[HostMeters], measured: MeasuredRound) -> list[HostRound]:
    """Return what each host found in the latest round; all compute at the same time."""
    return [wait() for wait in [host.account(measured) for host in hosts]]


def close_all(hosts: Iterable[HostMeters]) -> None:
    """Close meters that were never entered."""
    for host in hosts:
        host.close()


def enter_all(contexts: Iterable[AbstractContextManager[None]]) -> ExitStack:
    """Enter contexts in order. Leaving the returned stack leaves them in reverse order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()
