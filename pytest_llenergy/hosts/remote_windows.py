# SPDX-License-Identifier: Apache-2.0
"""The meters of another host, as the windows of ``energy_meter`` use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from pytest_llenergy.energy.host_window import HostWindow
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.hosts.client import AgentClient, Pending
from pytest_llenergy.hosts.meter_client import MeterClient
from pytest_llenergy.record.record import DomainEnergy, Flag


class RemoteWindows(MeterClient):
    """The ``WindowMeters`` of another host. Windows may begin and end in several threads.

    Once a window has ended, the agent computes its joules early, when nothing is measured. They count if the
    host is lost later; otherwise those that are computed on demand do, which use all windows of the name.
    """

    service = "windows"

    def __init__(self, client: AgentClient, others: Sequence[AgentClient] = ()) -> None:
        super().__init__(client, others)
        self._starts_ns: dict[int, int] = {}
        self._early: dict[int, Pending] = {}

    def start(self) -> Callable[[], object]:
        """See ``WindowMeters``."""
        slowest, wait = self._begin("longest_wait_s"), self._request("start")

        def finish() -> None:
            self._note_longest_wait(slowest)
            wait()
            # Known even if the host is lost later.
            self.infos()

        return finish

    def stop(self) -> None:
        """See ``WindowMeters``."""
        self.close()

    def compare_clocks(self, window: int) -> Callable[[], object]:
        """See ``WindowMeters``."""
        # The agent computes nothing meanwhile, which would delay its answers.
        wait = self._request("approach", window=window)

        def finish() -> None:
            wait()
            self._read_clocks()

        return finish

    def prepare(self, window: int) -> Callable[[], object]:
        """See ``WindowMeters``."""
        return self._request("prepare", window=window)

    def begin(self, window: int, time_ns: int, name: str, *, at_work: bool) -> None:
        """See ``WindowMeters``."""
        self._starts_ns[window] = time_ns
        self._request("begin", window=window, time_ns=self._to_remote(time_ns), name=name, at_work=at_work)

    def end(self, window: int, time_ns: int, name: str, *, at_work: bool) -> Callable[[], object]:
        """See ``WindowMeters``."""
        wait = self._request("end", window=window, at_work=at_work)

        def finish() -> None:
            wait()
            # The clocks may have drifted apart in the window: its end is marked afterwards.
            self._read_clocks()
            start_ns = self._starts_ns.pop(window)
            early = self._begin_account("account_early", window, start_ns, time_ns, name=name)
            if early is not None:
                self._early[window] = early

        return finish

    def account_window(self, window: int, start_ns: int, end_ns: int) -> Callable[[], HostWindow]:
        """See ``WindowMeters``."""
        clock = self._client.clock
        fault = clock.fault(start_ns, end_ns)
        if fault is not None:
            reason = f"{self._client.name} {fault}"
            flag = Flag(name="host", severity="invalid", detail=reason)
            return partial(self._without_energy, reason, [flag])
        slowest = self._begin("longest_wait_s")
        pending = self._begin_account("account", window, start_ns, end_ns)

        def finish() -> HostWindow:
            self._note_longest_wait(slowest)
            late: list[str] = []
            answer, early = self._await(pending, note=late.append), self._early.pop(window, None)
            if self._client.lost is not None:
                self.note_missing(self._client.lost)
            if answer is None and early is not None:
                with suppress(LLEnergyError):
                    answer = early.result(0.0)
            if answer is None:
                # An answer that is merely late costs this window, and not the host.
                return self._without_energy(self._missing or late[0])
            return self._name_host(msgspec.convert(answer, HostWindow))

        return finish

    def _begin_account(
        self, verb: str, window: int, start_ns: int, end_ns: int, **more: str
    ) -> Pending | None:
        clock = self._client.clock
        return self._begin(
            verb,
            window=window,
            start_ns=clock.to_remote(start_ns),
            end_ns=clock.to_remote(end_ns),
            clock_u_ns=max(clock.offset(edge_ns).u_ns for edge_ns in (start_ns, end_ns)),
            **more,
        )

    def _request(self, verb: str, **arguments: Any) -> Callable[[], Any]:
        """Send a request. Returns a function that waits for its answer, None if the host cannot answer."""
        return partial(self._await, self._begin(verb, **arguments))

    def _name_host(self, found: HostWindow) -> HostWindow:
        return replace(
            found,
            energies={self._prefix + name: self._name_energy(each) for name, each in found.energies.items()},
            by_domain={
                self._prefix + name: self._name_record(each) for name, each in found.by_domain.items()
            },
            reasons=list(self.reasons),
            flags=self._name_flags(found.flags),
        )

    def _without_energy(self, reason: str, flags: Sequence[Flag] = ()) -> HostWindow:
        by_domain = {
            each.domain: DomainEnergy(energy_j=None, energy_u_j=None, kind=each.kind, reason=reason)
            for each in self._infos
        }
        nothing = dict.fromkeys(by_domain, WindowEnergy(None, reason=reason))
        return HostWindow(nothing, by_domain, list(self.reasons), list(flags))
