# SPDX-License-Identifier: Apache-2.0
"""The meters of another host: moments are mapped to its clock, and its agent computes the energies between.

A host that has no meter, or that is lost, makes the sum over all hosts null, with the reason; the domains of
the others keep theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec

from pytest_llenergy.energy.host_window import HostWindow
from pytest_llenergy.energy.meters.base import MeterSpec
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.errors import LLEnergyError, MeterError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.peer import Pending
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.measure.host_meters import BlockPower, DomainFacts, DomainRound, HostRound, TickReference
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.ranks.pickling import dump_call
from pytest_llenergy.record.record import DomainEnergy, Flag, MeterInfo
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Span, Timeline

#: What is opened on each host.
Opened = TypeVar("Opened", bound="_RemoteMeters")


def open_remote_meters(
    kind: type[Opened],
    hosts: Sequence[tuple[RemoteHost, Sequence[str]]],
    names: Sequence[str] = (),
    *,
    require_measured: bool = False,
    specs: Sequence[MeterSpec] = (),
) -> list[Opened]:
    """Open the meters of several hosts at the same time.

    A host on which none can be opened has no domains and the reason, unless meters were asked for.

    Args:
        kind: ``RemoteMeters`` or ``RemoteWindows``.
        hosts: Each host with the UUIDs of its leased boards; without any, the meters are those of its CPU.
        names: As for ``meters.select.open_meters``.
        require_measured: Whether estimates are not accepted.
        specs: Meters that only this process has.

    Raises:
        MeterError: A meter of ``specs`` cannot be sent, or a host lacks a meter that ``names`` or
            ``require_measured`` ask for.
        WorkerError: A host is lost.
    """
    sent = [_dump_meter(each) for each in specs]
    everyone = [host for host, _ in hosts]
    opened = [kind(host, [each for each in everyone if each is not host]) for host in everyone]
    try:
        pending = [
            host.begin(f"{kind.answers}.open", tuple(boards), tuple(names), require_measured, sent)
            for host, boards in hosts
        ]
        for meters, each in zip(opened, pending, strict=True):
            try:
                meters.note_opened(each.result(timeouts.METERS_TIMEOUT_S))
            except MeterError as error:
                if names or require_measured:
                    raise
                meters.note_missing(str(error))
    except BaseException:
        for meters in opened:
            meters.close()
        raise
    return opened


def _dump_meter(spec: MeterSpec) -> bytes:
    """Pickle a meter of the hook ``pytest_llenergy_meters`` with its code, which other hosts may not have."""
    try:
        return dump_call(MeterSpec, tuple(spec), {}, elsewhere=True)
    except Exception as error:  # pickling calls code of the user
        raise MeterError(
            f"meter {spec.name} of pytest_llenergy_meters cannot be sent to other hosts: "
            f"{type(error).__name__}: {error}; its functions must not hold what belongs to this process"
        ) from None


class _RemoteMeters:
    """What rounds and windows both need of the meters of another host, which ``open_remote_meters`` makes."""

    #: What answers in the agent.
    answers: ClassVar[str]

    def __init__(self, host: RemoteHost, others: Sequence[RemoteHost] = ()) -> None:
        self._host, self._others = host, others
        #: Also for a single host, which may be another one than pytest's.
        self._prefix = f"{host.name}/"
        self._reasons: list[str] = []
        self._missing: str | None = None
        self._infos: list[MeterInfo] = []

    def note_opened(self, reasons: Sequence[str]) -> None:
        """Keep why some meters could not be opened."""
        self._reasons = [f"{self._host.name}: {reason}" for reason in reasons]

    def note_missing(self, reason: str) -> None:
        """Keep why the host has no energies from now on."""
        self._missing = self._missing or reason

    @property
    def reasons(self) -> Sequence[str]:
        return [*self._reasons, *([] if self._missing is None else [self._missing])]

    def infos(self) -> Sequence[MeterInfo]:
        found = self._await(self._begin("infos"))
        if found is not None:
            self._infos = [msgspec.structs.replace(each, domain=self._prefix + each.domain) for each in found]
        return self._infos

    def close(self) -> None:
        """Close the meters, if the host is not lost."""
        with suppress(LLEnergyError):
            self._host.call(f"{self.answers}.close", timeouts.METER_ANSWER_TIMEOUT_S)

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Pending | None:
        """Call a method, if the host can answer."""
        return None if self._missing else self._host.begin(f"{self.answers}.{method}", *args, **kwargs)

    def _await(self, pending: Pending | None) -> Any:
        """Return an answer. Without one, the host has no energies from now on."""
        if pending is None:
            return None
        try:
            return pending.result(timeouts.METER_ANSWER_TIMEOUT_S)
        except LLEnergyError as error:
            self.note_missing(self._host.lost or str(error))
            return None

    def _read_clocks(self) -> None:
        if self._missing is None:
            try:
                self._host.exchange()
            except LLEnergyError as error:
                self.note_missing(self._host.lost or str(error))

    def _clock_fault(self, start_ns: int, end_ns: int) -> list[Flag]:
        fault = self._host.clock.fault(start_ns, end_ns)
        if fault is None:
            return []
        return [Flag(name="host", severity="invalid", detail=f"{self._host.name} {fault}")]

    def _named(self, names: dict[str, Any], change: Callable[[Any], Any] = lambda each: each) -> Any:
        """Return values by the names of domains, which begin with that of the host."""
        return {self._prefix + name: change(each) for name, each in names.items()}

    def _name_energy(self, energy: WindowEnergy) -> WindowEnergy:
        return energy._replace(reason=self._name_reason(energy.reason))

    def _name_record(self, record: DomainEnergy) -> DomainEnergy:
        return msgspec.structs.replace(record, reason=self._name_reason(record.reason))

    def _name_reason(self, reason: str | None) -> str | None:
        """Return a reason with the name of the host, which a reader would miss."""
        return None if reason is None else f"{self._host.name}: {reason}"

    def _name_flags(self, flags: Sequence[Flag]) -> list[Flag]:
        return [msgspec.structs.replace(flag, detail=f"{self._host.name}: {flag.detail}") for flag in flags]


class RemoteMeters(_RemoteMeters):
    """The ``HostMeters`` of another host."""

    answers = "rounds"

    def __init__(self, host: RemoteHost, others: Sequence[RemoteHost] = ()) -> None:
        super().__init__(host, others)
        self.load_average: float | None = None
        self._pending: list[Pending] = []
        self._domains: list[DomainFacts] = []

    @property
    def lost(self) -> str | None:
        return self._host.lost

    def __enter__(self) -> RemoteMeters:
        self.load_average = self._ask("enter")
        # Known even if the host is lost later.
        self.infos()
        self.domains()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def domains(self) -> Sequence[DomainFacts]:
        found = self._ask("domains")
        if found is not None:
            self._domains = [msgspec.structs.replace(each, name=self._prefix + each.name) for each in found]
        return self._domains

    def await_ticks(self, after_ns: int, timeout_s: float) -> None:
        self._send("await_ticks", self._host.clock.to_remote(after_ns), timeout_s)
        self._settle()

    @contextmanager
    def reading_closely(self) -> Iterator[None]:
        self._ask("set_mode", "reading_closely")
        try:
            yield
        finally:
            self._send("set_mode", None)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._ask("set_mode", "at_work")
        try:
            yield
        finally:
            self._send("set_mode", None)

    def tick_reference(self) -> TickReference | None:
        found: TickReference | None = self._ask("tick_reference")
        return None if found is None else found._replace(time_ns=self._host.clock.to_local(found.time_ns))

    def block_power(self, start_ns: int, end_ns: int) -> BlockPower | None:
        found: BlockPower | None = self._ask("block_power", *self._to_remote(start_ns, end_ns))
        return found

    def required_round_s(
        self, start_ns: int, end_ns: int, busy_w: float | None, rounds: int, target: float
    ) -> float:
        moments_ns = self._to_remote(start_ns, end_ns)
        return float(self._ask("required_round_s", *moments_ns, busy_w, rounds, target) or 0.0)

    def begin_gap(self) -> None:
        self._compare_clocks()
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
        self._compare_clocks()
        self._send("end_gap")
        return ended_ns

    def account(self, measured: MeasuredRound) -> Callable[[], HostRound]:
        self._send("account", self._on_clock(measured))
        return partial(self._await_round, measured)

    def _await_round(self, measured: MeasuredRound) -> HostRound:
        found: HostRound | None = self._settle()
        if found is None:
            return self._round_without_energy(measured)
        return replace(
            found,
            domains=[
                replace(
                    each,
                    name=self._prefix + each.name,
                    whole=self._name_energy(each.whole),
                    phases={name: self._name_energy(energy) for name, energy in each.phases.items()},
                    record=self._name_record(each.record),
                )
                for each in found.domains
            ],
            reasons=list(self.reasons),
            flags=[
                *self._name_flags(found.flags),
                *self._clock_fault(measured.gap_start_ns, measured.gap_end_ns),
            ],
        )

    def _ask(self, method: str, *args: Any) -> Any:
        self._send(method, *args)
        return self._settle()

    def _send(self, method: str, *args: Any) -> None:
        """Call a method whose result ``_settle`` awaits. Hosts serve it at the same time."""
        pending = self._begin(method, *args)
        self._pending += [] if pending is None else [pending]

    def _settle(self) -> Any:
        """Wait for the answers to all calls. Returns the last one."""
        pending, self._pending = self._pending, []
        answer = None
        for each in pending:
            answer = self._await(each)
        return answer if self._missing is None else None

    def _compare_clocks(self) -> None:
        # First, so that the agent has nothing else to do.
        self._settle()
        self._read_clocks()

    def _to_remote(self, *moments_ns: int) -> list[int]:
        return [self._host.clock.to_remote(each) for each in moments_ns]

    def _on_clock(self, measured: MeasuredRound) -> MeasuredRound:
        """Return what the host needs of a round, with all moments on its clock."""
        timeline, to_remote = measured.timeline, self._host.clock.to_remote
        parts = sorted(
            (start, end, name) for name, several in phase_spans(timeline).items() for start, end in several
        )
        work = Iteration(
            start_ns=to_remote(timeline.start_ns),
            end_ns=to_remote(timeline.end_ns),
            spans=tuple(Span(name=name, start_ns=to_remote(a), end_ns=to_remote(b)) for a, b, name in parts)
            or None,
        )
        # A server is on one host, and so is its test.
        rank = RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0, servers=tuple(timeline.servers))
        return MeasuredRound(
            Timeline(ranks=(rank,)),
            to_remote(measured.gap_start_ns),
            to_remote(measured.gap_end_ns),
            clock_u_ns=_largest_u_ns([self._host], timeline),
            # A rank of any host may have marked the edges.
            marking_u_ns=_largest_u_ns(self._others, timeline),
            requests=tuple(
                span._replace(
                    start_ns=to_remote(span.start_ns),
                    first_token_ns=to_remote(span.first_token_ns),
                    end_ns=to_remote(span.end_ns),
                )
                for span in measured.requests
            ),
        )

    def _round_without_energy(self, measured: MeasuredRound) -> HostRound:
        nothing = WindowEnergy(None, reason=self._missing)
        phases = dict.fromkeys(phase_spans(measured.timeline), nothing)
        domains = []
        for each in self._domains:
            record = DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=self._missing)
            domains.append(DomainRound(each.name, nothing, phases, None, record))
        flags = [] if self.lost is None else [Flag(name="host", severity="invalid", detail=self.lost)]
        return HostRound(domains, list(self.reasons), flags)


def _largest_u_ns(hosts: Sequence[RemoteHost], timeline: Timeline) -> float:
    """Return the largest standard uncertainty of the clocks of these hosts at the edges of a round."""
    edges_ns = (timeline.start_ns, timeline.end_ns)
    return max((each.clock.offset(edge_ns).u_ns for each in hosts for edge_ns in edges_ns), default=0.0)


class RemoteWindows(_RemoteMeters):
    """The ``WindowMeters`` of another host. Windows may begin and end in several threads."""

    answers = "windows"

    def start(self) -> Callable[[], object]:
        """See ``WindowMeters``."""
        wait = self._request("start")

        def finish() -> None:
            wait()
            # Known even if the host is lost later.
            self.infos()

        return finish

    def stop(self) -> None:
        """See ``WindowMeters``."""
        self.close()

    def compare_clocks(self, window: int) -> Callable[[], object]:
        """See ``WindowMeters``."""
        return self._read_clocks

    def prepare(self, window: int) -> Callable[[], object]:
        """See ``WindowMeters``."""
        return self._request("prepare", window)

    def begin(self, window: int, time_ns: int, name: str, *, at_work: bool) -> None:
        """See ``WindowMeters``."""
        self._request("begin", window, self._host.clock.to_remote(time_ns), name, at_work=at_work)

    def end(self, window: int, time_ns: int, name: str, *, at_work: bool) -> Callable[[], object]:
        """See ``WindowMeters``."""
        wait = self._request("end_work", window, at_work=at_work)

        def finish() -> None:
            wait()
            # The clocks may have drifted apart in the window: its end is marked afterwards.
            self._read_clocks()
            self._request("mark_end", self._host.clock.to_remote(time_ns), name)

        return finish

    def account_window(self, window: int, start_ns: int, end_ns: int) -> Callable[[], HostWindow]:
        """See ``WindowMeters``."""
        clock = self._host.clock
        if flags := self._clock_fault(start_ns, end_ns):
            return partial(self._without_energy, flags[0].detail, flags)
        u_ns = max(clock.offset(edge_ns).u_ns for edge_ns in (start_ns, end_ns))
        moments_ns = clock.to_remote(start_ns), clock.to_remote(end_ns)
        pending = self._begin("account_window", window, *moments_ns, clock_u_ns=u_ns)

        def finish() -> HostWindow:
            found: HostWindow | None = self._await(pending)
            if found is None:
                return self._without_energy(self._missing or "")
            return replace(
                found,
                energies=self._named(found.energies, self._name_energy),
                by_domain=self._named(found.by_domain, self._name_record),
                reasons=list(self.reasons),
                flags=self._name_flags(found.flags),
            )

        return finish

    def _request(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call a method. Returns a function that waits for its result, None if the host cannot answer."""
        return partial(self._await, self._begin(method, *args, **kwargs))

    def _without_energy(self, reason: str, flags: Sequence[Flag] = ()) -> HostWindow:
        by_domain = {
            each.domain: DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=reason)
            for each in self._infos
        }
        nothing = dict.fromkeys(by_domain, WindowEnergy(None, reason=reason))
        return HostWindow(nothing, by_domain, list(self.reasons), list(flags))
