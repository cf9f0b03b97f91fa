# SPDX-License-Identifier: Apache-2.0
"""What a launcher provides: hosts that exist, and gangs of hosts with an agent on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.hosts.remote_host import RemoteHost

#: For gangs that may use all hosts.
NONE_LOST: Mapping[str, str] = MappingProxyType({})


class NeverError(DeviceError):
    """The cluster has no such hosts, busy or not; the message says which it has. The test is skipped."""


class BusyError(DeviceError):
    """The hosts exist but did not become free in time; the message names who holds them."""


@dataclass(frozen=True)
class Shape:
    """What a test asks for: this many hosts, and this many devices on each (0 for the CPU alone).

    ``is_example`` is whether the test would accept other numbers of hosts too, if the cluster had them.
    """

    hosts: int
    per_host: int
    is_example: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        gpus = f"{self.per_host or 'no'} GPU{'s' * (self.per_host != 1)}"
        text = f"1 host with {gpus}" if self.hosts == 1 else f"{self.hosts} hosts with {gpus} each"
        return f"{self.hosts * self.per_host} GPUs, such as {text}" if self.is_example else text


@dataclass(frozen=True)
class HostOffer:
    """A host of the cluster: its name there, and how many GPUs tests may use."""

    name: str
    devices: int


class Gang(Protocol):
    """Hosts that one test uses, all or none of them."""

    @property
    def hosts(self) -> Sequence[RemoteHost]:
        """The hosts in the order of the ranks: the ranks of the first one come first."""

    def lost(self) -> Mapping[str, str]:
        """Return the reason for each host that was lost, by name: its agent's, or a better one."""

    def close(self) -> None:
        """End the agents with everything that they run, and free the hosts."""


class Cluster(Protocol):
    """A launcher."""

    def offers(self) -> Sequence[HostOffer]:
        """Return the hosts that exist, for the reasons of skips and for ``llenergy doctor``."""

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> Gang:
        """Start a gang, once all its hosts are free.

        Args:
            shape: Hosts and devices.
            wait_s: How long to wait for busy hosts (seconds).
            on_wait: Called while it waits, with a line that names the holders.
            avoid: Hosts that are not used, and why, by name.

        Raises:
            NeverError: The cluster can never provide it.
            BusyError: It did not become free in time.
            WorkerError: An agent does not start, or its host differs from the others.
        """

    def close(self) -> None:
        """End all gangs and the launcher."""


def choose_shape(request: GpuRequest, offers: Sequence[HostOffer]) -> Shape:
    """Return how many hosts a request needs: without ``per_host`` as few as can hold it in equal shares.

    If no hosts can, the result is the smallest shape whose share fits on the largest host, and one host if
    none has GPUs; the cluster then explains why it cannot provide it.
    """
    if request.per_host is not None:
        return Shape(request.n // request.per_host, request.per_host)
    counts = [hosts for hosts in range(1, request.n + 1) if request.n % hosts == 0]
    for hosts in counts:
        if sum(offer.devices >= request.n // hosts for offer in offers) >= hosts:
            return Shape(hosts, request.n // hosts)
    largest = max((offer.devices for offer in offers), default=0)
    hosts = next((hosts for hosts in counts if request.n // hosts <= largest), 1)
    return Shape(hosts, request.n // hosts, is_example=len(counts) > 1)
