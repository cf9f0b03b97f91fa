# SPDX-License-Identifier: Apache-2.0
"""The meters of another host: moments are mapped to its clock, and its agent computes the energies between.

A window is a round without gaps. A host that has no meter, or that is lost, makes the sum over all hosts
null, with the reason; the domains of the others keep theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec

from pytest_llenergy.energy.host_window import HostWindow
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.errors import LLEnergyError, MeterError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.peer import Pending
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.measure.host_meters import DomainFacts, DomainRound, HostRound, TickReference
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.record import DomainEnergy, Flag, MeterInfo
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Span, Timeline


def open_remote_meters(
    kind: Literal["rounds", "windows"],
    hosts: Sequence[tuple[RemoteHost, Sequence[str]]],
    names: Sequence[str] = (),
    *,
    require_measured: bool = False,
) -> list[RemoteMeters]:
    """Open the meters of several hosts at the same time.

    A host on which none can be opened has no domains and the reason, unless meters were asked for.

    Args:
        kind: What they are for: a window may contain rounds, so that each has its own.
        hosts: Each host with the UUIDs of its leased boards; without any, the meters are those of its CPU.
        names: As for ``meters.select.open_meters``.
        require_measured: Whether estimates are not accepted.

    Raises:
        MeterError: A host lacks a meter that ``names`` or ``require_measured`` ask for.
        WorkerError: A host is lost.
    """
    everyone = [host for host, _ in hosts]
    opened = [RemoteMeters(host, kind, [each for each in everyone if each is not host]) for host in everyone]
    try:
        pending = [
            host.begin(f"{kind}.open", host.name, tuple(boards), tuple(names), require_measured)
            for host, boards in hosts
        ]
        for meters, each in zip(opened, pending, strict=True):
            try:
                reasons = each.result(timeouts.METERS_TIMEOUT_S)
                meters.unopened = [f"{meters.host.name}: {reason}" for reason in reasons]
            except MeterError as error:
                if names or require_measured:
                    raise
                meters.missing = str(error)
    except BaseException:
        for meters in opened:
            meters.close()
        raise
    return opened


class RemoteMeters:
    """The ``HostMeters`` and ``WindowMeters`` of another host. Several threads may begin and end windows."""

    def __init__(self, host: RemoteHost, kind: str, others: Sequence[RemoteHost] = ()) -> None:
        self.load_average: float | None = None
        self.host, self._kind, self._others = host, kind, others
        #: Why some meters could not be opened, and why it has no energies from some moment on.
        self.unopened: list[str] = []
        self.missing: str | None = None
        #: Calls of a round whose answers ``_settle`` awaits.
        self._pending: list[Pending | None] = []
        # Known even if the host is lost later.
        self._infos: list[MeterInfo] = []
        self._domains: list[DomainFacts] = []

    @property
    def reasons(self) -> Sequence[str]:
        return [*self.unopened, *([] if self.missing is None else [self.missing])]

    @property
    def lost(self) -> str | None:
        return self.host.lost

    def infos(self) -> Sequence[MeterInfo]:
        self._infos = self._await(self._begin("infos")) or self._infos
        return self._infos

    def close(self) -> None:
        with suppress(LLEnergyError):
            self.host.call(f"{self._kind}.close", timeouts.METERS_TIMEOUT_S)

    # Rounds

    def __enter__(self) -> RemoteMeters:
        self.load_average = self._ask("start")
        self.infos()
        self.domains()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def domains(self) -> Sequence[DomainFacts]:
        self._domains = self._ask("domains") or self._domains
        return self._domains

    def await_ticks(self, after_ns: int, timeout_s: float) -> None:
        self._ask("await_ticks", self.host.clock.to_remote(after_ns), timeout_s)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._ask("set_mode", "at_work")
        try:
            yield
        finally:
            self._send("set_mode", None)

    def tick_reference(self) -> TickReference | None:
        found: TickReference | None = self._ask("tick_reference")
        return None if found is None else found._replace(time_ns=self.host.clock.to_local(found.time_ns))

    def begin_gap(self) -> None:
        self._read_clocks()
        self._send("begin_gap")

    def prepare_work(self) -> None:
        self._send("begin_work")

    def begin_work(self) -> None:
        self._settle()

    def end_work(self) -> None:
        self._send("end_work")

    def end_gap(self) -> int:
        ended_ns = time.monotonic_ns()
        # Before the ranks report their round: its moments on their own clocks are mapped when they arrive.
        self._read_clocks()
        self._send("end_gap")
        return ended_ns

    def account(self, measured: MeasuredRound) -> Callable[[], HostRound]:
        self._send("account", self._on_clock(measured))

        def finish() -> HostRound:
            found: HostRound | None = self._settle()
            if found is None:
                return self._round_without_energy(measured)
            return replace(
                found,
                reasons=list(self.reasons),
                flags=[
                    *self._name_flags(found.flags),
                    *self._clock_fault(measured.gap_start_ns, measured.gap_end_ns),
                ],
            )

        return finish

    # Windows

    def start(self) -> Callable[[], object]:
        pending = self._begin("start")

        def finish() -> None:
            self._await(pending)
            self.infos()

        return finish

    def stop(self) -> None:
        self.close()

    def compare_clocks(self, window: int) -> Callable[[], object]:
        return self._read_clocks

    def prepare(self, window: int) -> Callable[[], object]:
        return partial(self._await, self._begin("prepare", window))

    def begin(self, window: int, time_ns: int, name: str, *, at_work: bool) -> None:
        self._begin("begin", window, self.host.clock.to_remote(time_ns), name, at_work=at_work)

    def end(self, window: int, time_ns: int, name: str, *, at_work: bool) -> Callable[[], object]:
        pending = self._begin("end_work", window, at_work=at_work)

        def finish() -> None:
            self._await(pending)
            # The clocks may have drifted apart in the window: its end is marked afterwards.
            self._read_clocks()
            self._begin("mark_end", self.host.clock.to_remote(time_ns), name)

        return finish

    def account_window(self, window: int, start_ns: int, end_ns: int) -> Callable[[], HostWindow]:
        if flags := self._clock_fault(start_ns, end_ns):
            return partial(self._window_without_energy, flags[0].detail, flags)
        u_ns = _largest_u_ns([self.host], start_ns, end_ns)
        pending = self._begin("account_window", window, *self._to_remote(start_ns, end_ns), clock_u_ns=u_ns)

        def finish() -> HostWindow:
            found: HostWindow | None = self._await(pending)
            if found is None:
                return self._window_without_energy(self.missing or "")
            return replace(
                found,
                reasons=list(self.reasons),
                flags=self._name_flags(found.flags),
            )

        return finish

    # Calls

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Pending | None:
        """Call a method, if the host can answer."""
        return None if self.missing else self.host.begin(f"{self._kind}.{method}", *args, **kwargs)

    def _await(self, pending: Pending | None) -> Any:
        """Return an answer. Without one, the host has no energies from now on."""
        if pending is None:
            return None
        try:
            return pending.result(timeouts.METERS_TIMEOUT_S)
        except LLEnergyError as error:
            self.missing = self.missing or self.host.lost or str(error)
            return None

    def _send(self, method: str, *args: Any) -> None:
        """Call a method whose result ``_settle`` awaits. Hosts serve it at the same time."""
        self._pending.append(self._begin(method, *args))

    def _settle(self) -> Any:
        """Wait for the answers to all calls. Returns the last one."""
        pending, self._pending = self._pending, []
        answers = [self._await(each) for each in pending]
        return answers[-1] if answers and self.missing is None else None

    def _ask(self, method: str, *args: Any) -> Any:
        self._send(method, *args)
        return self._settle()

    def _read_clocks(self) -> None:
        # First, so that the agent has nothing else to do.
        self._settle()
        if self.missing is None:
            try:
                self.host.exchange()
            except LLEnergyError as error:
                self.missing = self.missing or self.host.lost or str(error)

    # Clocks

    def _to_remote(self, *moments_ns: int) -> list[int]:
        return [self.host.clock.to_remote(each) for each in moments_ns]

    def _clock_fault(self, start_ns: int, end_ns: int) -> list[Flag]:
        fault = self.host.clock.fault(start_ns, end_ns)
        if fault is None:
            return []
        return [Flag(name="host", severity="invalid", detail=f"{self.host.name} {fault}")]

    def _on_clock(self, measured: MeasuredRound) -> MeasuredRound:
        """Return what the host needs of a round, with all moments on its clock."""
        timeline, to_remote = measured.timeline, self.host.clock.to_remote
        parts = sorted(
            (start, end, name) for name, several in phase_spans(timeline).items() for start, end in several
        )
        spans = tuple(Span(name=name, start_ns=to_remote(a), end_ns=to_remote(b)) for a, b, name in parts)
        start_ns, end_ns = self._to_remote(timeline.start_ns, timeline.end_ns)
        work = Iteration(start_ns=start_ns, end_ns=end_ns, spans=spans or None)
        # A server is on one host, and so is its test.
        rank = RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0, servers=tuple(timeline.servers))
        return MeasuredRound(
            Timeline(ranks=(rank,)),
            to_remote(measured.gap_start_ns),
            to_remote(measured.gap_end_ns),
            clock_u_ns=_largest_u_ns([self.host], timeline.start_ns, timeline.end_ns),
            # A rank of any host may have marked the edges.
            marking_u_ns=_largest_u_ns(self._others, timeline.start_ns, timeline.end_ns),
            requests=tuple(
                span._replace(
                    start_ns=to_remote(span.start_ns),
                    first_token_ns=to_remote(span.first_token_ns),
                    end_ns=to_remote(span.end_ns),
                )
                for span in measured.requests
            ),
        )

    def _name_flags(self, flags: Sequence[Flag]) -> list[Flag]:
        """Return flags with the name of the host, which those of domains have."""
        name = self.host.name
        return [
            flag
            if flag.detail.startswith(f"{name}/")
            else msgspec.structs.replace(flag, detail=f"{name}: {flag.detail}")
            for flag in flags
        ]

    def _round_without_energy(self, measured: MeasuredRound) -> HostRound:
        nothing = WindowEnergy(None, reason=self.missing)
        phases = dict.fromkeys(phase_spans(measured.timeline), nothing)
        domains = []
        for each in self._domains:
            record = DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=self.missing)
            domains.append(DomainRound(each.name, nothing, phases, None, record))
        flags = [] if self.lost is None else [Flag(name="host", severity="invalid", detail=self.lost)]
        return HostRound(domains, list(self.reasons), flags)

    def _window_without_energy(self, reason: str, flags: Sequence[Flag] = ()) -> HostWindow:
        by_domain = {
            each.domain: DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=reason)
            for each in self._infos
        }
        nothing = dict.fromkeys(by_domain, WindowEnergy(None, reason=reason))
        return HostWindow(nothing, by_domain, list(self.reasons), list(flags))


def _largest_u_ns(hosts: Sequence[RemoteHost], *edges_ns: int) -> float:
    """Return the largest standard uncertainty of the clocks of these hosts at some moments."""
    return max((each.clock.offset(edge_ns).u_ns for each in hosts for edge_ns in edges_ns), default=0.0)
