# SPDX-License-Identifier: Apache-2.0
"""pytest's side of the meters of other hosts: how they are opened, and what rounds and windows both need.

A host that has no meter, or that is lost, makes the sum over all hosts null, with the reason;
the domains of the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec

from pytest_llenergy.energy.meters.base import MeterSpec
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.errors import LLEnergyError, MeterError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.client import AgentClient, Pending
from pytest_llenergy.ranks.pickling import dump_call
from pytest_llenergy.record.record import DomainEnergy, Flag, MeterInfo

#: What is opened on each host.
Opened = TypeVar("Opened", bound="MeterClient")


def dump_meters(specs: Sequence[MeterSpec]) -> list[bytes]:
    """Pickle meters of the hook ``pytest_llenergy_meters`` with their code, which other hosts may not have.

    Raises:
        MeterError: A meter holds something that cannot be sent.
    """
    found = []
    for spec in specs:
        try:
            found.append(dump_call(MeterSpec, tuple(spec), {}, elsewhere=True))
        except Exception as error:  # pickling calls code of the user
            raise MeterError(
                f"meter {spec.name} of pytest_llenergy_meters cannot be sent to other hosts: "
                f"{type(error).__name__}: {error}; its functions must not hold what belongs to this process"
            ) from None
    return found


def open_remote_meters(
    kind: type[Opened],
    hosts: Sequence[tuple[AgentClient, Sequence[str]]],
    names: Sequence[str] = (),
    *,
    require_measured: bool = False,
    specs: Sequence[MeterSpec] = (),
) -> list[Opened]:
    """Open the meters of several hosts at the same time.

    A host on which none can be opened has no domains and the reason, unless meters were asked for.

    Args:
        kind: What is made for each host.
        hosts: Each host with the UUIDs of its leased boards; without any, the meters are those of its CPU.
        names: As for ``meters.select.open_meters``.
        require_measured: Whether estimates are not accepted.
        specs: Meters that only this process has.

    Raises:
        MeterError: A meter of ``specs`` cannot be sent, or a host lacks a meter that ``names`` or
            ``require_measured`` ask for.
        WorkerError: A host is lost.
    """
    clients = [client for client, _ in hosts]
    wanted = {"names": list(names), "require_measured": require_measured, "specs": dump_meters(specs)}
    opened = [kind(client, [each for each in clients if each is not client]) for client in clients]
    try:
        pending = [
            client.begin(f"{kind.service}.open", boards=list(boards), **wanted) for client, boards in hosts
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


class MeterClient:
    """The meters of another host, which ``open_remote_meters`` makes: ``RemoteMeters`` or ``RemoteWindows``.

    Args:
        client: The agent of the host.
        others: The agents of the other hosts.
    """

    #: The service of the agent, which is the first part of its verbs.
    service: ClassVar[str]

    def __init__(self, client: AgentClient, others: Sequence[AgentClient] = ()) -> None:
        self._client = client
        self._others = others
        #: Also for a single host, which may be another one than pytest's.
        self._prefix = f"{client.name}/"
        self._reasons: list[str] = []
        self._missing: str | None = None
        self._infos: list[MeterInfo] = []
        #: How long the agent may wait for slow counters before it answers (seconds).
        self._longest_wait_s = 0.0

    def note_opened(self, reasons: Sequence[str]) -> None:
        """Keep why some meters could not be opened."""
        self._reasons = [f"{self._client.name}: {reason}" for reason in reasons]

    def note_missing(self, reason: str) -> None:
        """Keep why the host has no energies from now on."""
        self._missing = self._missing or reason

    @property
    def reasons(self) -> Sequence[str]:
        return [*self._reasons, *([] if self._missing is None else [self._missing])]

    def infos(self) -> Sequence[MeterInfo]:
        found = self._ask("infos")
        if found is not None:
            infos = msgspec.convert(found, list[MeterInfo])
            self._infos = [msgspec.structs.replace(each, domain=self._prefix + each.domain) for each in infos]
        return self._infos

    def close(self) -> None:
        """Close the meters, if the host is not lost."""
        with suppress(LLEnergyError):
            self._client.call(f"{self.service}.close", timeouts.METER_ANSWER_TIMEOUT_S)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Return the answer of the agent; ``None`` if the host is lost or has no meter."""
        return self._await(self._begin(verb, **arguments))

    def _begin(self, verb: str, **arguments: Any) -> Pending | None:
        """Send a request, if the host can answer."""
        if self._missing is not None:
            return None
        send = partial(self._client.begin, f"{self.service}.{verb}", **arguments)
        pending: Pending | None = self._guard(send)
        return pending

    def _await(
        self, pending: Pending | None, more_s: float = 0.0, note: Callable[[str], object] | None = None
    ) -> Any:
        """Wait for an answer, which may take ``more_s`` in addition to the usual limit; see ``_guard``."""
        limit_s = timeouts.METER_ANSWER_TIMEOUT_S + self._longest_wait_s + more_s
        return None if pending is None else self._guard(partial(pending.result, limit_s), note)

    def _guard(self, function: Callable[[], Any], note: Callable[[str], object] | None = None) -> Any:
        """Call a function. Without an answer, ``note`` is called, or the host has no energies from now on."""
        try:
            return function()
        except LLEnergyError as error:
            (note or self.note_missing)(self._client.lost or str(error))
            return None

    def _note_longest_wait(self, pending: Pending | None) -> None:
        """Keep the answer to ``longest_wait_s``, which grows once the period of a counter is observed.

        One that is late changes nothing.
        """
        found = self._await(pending, note=lambda _reason: None)
        self._longest_wait_s = found or self._longest_wait_s

    def _read_clocks(self) -> None:
        if self._missing is None:
            self._guard(self._client.exchange)

    def _to_remote(self, local_ns: int) -> int:
        return self._client.clock.to_remote(local_ns)

    def _name_reason(self, reason: str | None) -> str | None:
        """Return a reason with the name of the host, which a reader would miss."""
        return None if reason is None else f"{self._client.name}: {reason}"

    def _name_energy(self, energy: WindowEnergy) -> WindowEnergy:
        return energy._replace(reason=self._name_reason(energy.reason))

    def _name_record(self, record: DomainEnergy) -> DomainEnergy:
        return msgspec.structs.replace(record, reason=self._name_reason(record.reason))

    def _name_flags(self, flags: Sequence[Flag]) -> list[Flag]:
        return [msgspec.structs.replace(flag, detail=f"{self._client.name}: {flag.detail}") for flag in flags]
