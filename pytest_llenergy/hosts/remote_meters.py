# SPDX-License-Identifier: Apache-2.0
"""The meters of another host, as measuring uses them.

Moments are mapped to the clock of that host, whose agent computes the joules between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.hosts.client import AgentClient, Pending
from pytest_llenergy.hosts.meter_client import MeterClient
from pytest_llenergy.hosts.meter_service import RoundMoments
from pytest_llenergy.measure.host_meters import BlockPower, DomainFacts, DomainRound, HostRound, TickReference
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.record import DomainEnergy, Flag
from pytest_llenergy.record.timeline import Timeline


class RemoteMeters(MeterClient):
    """The ``HostMeters`` of another host."""

    service = "meters"

    def __init__(self, client: AgentClient, others: Sequence[AgentClient] = ()) -> None:
        super().__init__(client, others)
        self.load_average: float | None = None
        self._pending: list[Pending] = []
        self._domains: list[DomainFacts] = []

    @property
    def lost(self) -> str | None:
        return self._client.lost

    def __enter__(self) -> RemoteMeters:
        self.load_average = self._ask("start")
        # Known even if the host is lost later.
        self.infos()
        self.domains()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def domains(self) -> Sequence[DomainFacts]:
        found = self._ask("domains")
        if found is not None:
            facts = msgspec.convert(found, list[DomainFacts])
            self._domains = [msgspec.structs.replace(each, name=self._prefix + each.name) for each in facts]
            self._note_longest_wait(self._begin("longest_wait_s"))
        return self._domains

    def await_ticks(self, after_ns: int, timeout_s: float) -> None:
        self._send("await_ticks", after_ns=self._to_remote(after_ns), timeout_s=timeout_s)
        self._settle(timeout_s)

    @contextmanager
    def reading_closely(self) -> Iterator[None]:
        self._ask("read_closely", on=True)
        try:
            yield
        finally:
            self._send("read_closely", on=False)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._ask("spare_work", on=True)
        try:
            yield
        finally:
            self._send("spare_work", on=False)

    def tick_reference(self) -> TickReference | None:
        found: TickReference | None = msgspec.convert(self._ask("tick_reference"), TickReference | None)
        return None if found is None else found._replace(time_ns=self._client.clock.to_local(found.time_ns))

    def block_power(self, start_ns: int, end_ns: int) -> BlockPower | None:
        moments = {"start_ns": self._to_remote(start_ns), "end_ns": self._to_remote(end_ns)}
        found: BlockPower | None = msgspec.convert(self._ask("block_power", **moments), BlockPower | None)
        return found

    def required_round_s(
        self, start_ns: int, end_ns: int, busy_w: float | None, rounds: int, target: float
    ) -> float:
        found = self._ask(
            "required_round_s",
            start_ns=self._to_remote(start_ns),
            end_ns=self._to_remote(end_ns),
            busy_w=busy_w,
            rounds=rounds,
            target=target,
        )
        return 0.0 if found is None else float(found)

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
        self._send("account", moments=self._moments(measured))
        return partial(self._await_round, measured)

    def _await_round(self, measured: MeasuredRound) -> HostRound:
        answer = self._settle()
        if answer is None:
            return self._round_without_energy(measured)
        found = self._name_host(msgspec.convert(answer, HostRound))
        fault = self._client.clock.fault(measured.gap_start_ns, measured.gap_end_ns)
        if fault is None:
            return found
        flag = Flag(name="host", severity="invalid", detail=f"{self._client.name} {fault}")
        return replace(found, flags=[*found.flags, flag])

    def _ask(self, verb: str, **arguments: Any) -> Any:
        self._send(verb, **arguments)
        return self._settle()

    def _send(self, verb: str, **arguments: Any) -> None:
        """Send a request whose answer ``_settle`` awaits. Hosts serve it at the same time."""
        pending = self._begin(verb, **arguments)
        self._pending += [] if pending is None else [pending]

    def _settle(self, more_s: float = 0.0) -> Any:
        """Wait for the answers to all requests. Returns the last one."""
        pending, self._pending = self._pending, []
        answer = None
        for each in pending:
            answer = self._await(each, more_s)
        return answer if self._missing is None else None

    def _compare_clocks(self) -> None:
        # First, so that the agent has nothing else to do.
        self._settle()
        self._read_clocks()

    def _moments(self, measured: MeasuredRound) -> Any:
        """Return the moments of a round on the clock of the host."""
        timeline, clock = measured.timeline, self._client.clock
        spans = phase_spans(timeline)
        parts = sorted((start, end, name) for name, several in spans.items() for start, end in several)
        moments = RoundMoments(
            gap_start_ns=clock.to_remote(measured.gap_start_ns),
            start_ns=clock.to_remote(timeline.start_ns),
            end_ns=clock.to_remote(timeline.end_ns),
            gap_end_ns=clock.to_remote(measured.gap_end_ns),
            phases=[(name, clock.to_remote(start), clock.to_remote(end)) for start, end, name in parts],
            u_ns=_largest_u_ns([self._client], timeline),
            # A rank of any host may have marked the edges.
            marking_u_ns=_largest_u_ns(self._others, timeline),
            # A server is on one host, and so is its test.
            servers=tuple(timeline.servers),
            requests=tuple(
                span._replace(
                    start_ns=clock.to_remote(span.start_ns),
                    first_token_ns=clock.to_remote(span.first_token_ns),
                    end_ns=clock.to_remote(span.end_ns),
                )
                for span in measured.requests
            ),
        )
        return msgspec.to_builtins(moments)

    def _name_host(self, found: HostRound) -> HostRound:
        """Return what the host found, with its name wherever a reader would miss it."""
        return replace(
            found,
            domains=[self._name_host_of(domain) for domain in found.domains],
            reasons=list(self.reasons),
            flags=self._name_flags(found.flags),
        )

    def _name_host_of(self, domain: DomainRound) -> DomainRound:
        phases = {name: self._name_energy(energy) for name, energy in domain.phases.items()}
        whole, record = self._name_energy(domain.whole), self._name_record(domain.record)
        return replace(domain, name=self._prefix + domain.name, whole=whole, phases=phases, record=record)

    def _round_without_energy(self, measured: MeasuredRound) -> HostRound:
        nothing = WindowEnergy(None, reason=self._missing)
        phases = dict.fromkeys(phase_spans(measured.timeline), nothing)
        domains = [
            DomainRound(
                each.name,
                nothing,
                phases,
                None,
                DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=self._missing),
            )
            for each in self._domains
        ]
        flags = [] if self.lost is None else [Flag(name="host", severity="invalid", detail=self.lost)]
        return HostRound(domains, list(self.reasons), flags)


def _largest_u_ns(clients: Sequence[AgentClient], timeline: Timeline) -> float:
    """Return the largest standard uncertainty of the clocks of these hosts at the edges of a round."""
    edges_ns = (timeline.start_ns, timeline.end_ns)
    return max((each.clock.offset(edge_ns).u_ns for each in clients for edge_ns in edges_ns), default=0.0)
