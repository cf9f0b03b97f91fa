# SPDX-License-Identifier: Apache-2.0
"""What a launcher provides: hosts that exist, and gangs of hosts with an agent on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Protocol

from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.hosts.remote_host import RemoteHost, close_all
from pytest_llenergy.record.text import one_line, shorten

#: For gangs that may use all hosts.
NONE_LOST: Mapping[str, str] = MappingProxyType({})

#: How much of the output of a launcher is read (bytes), and how much of it a message quotes (characters).
TAIL_BYTES, QUOTED = 4000, 600


class NeverError(DeviceError):
    """The cluster has no such hosts, busy or not; the message says which it has. The test is skipped."""


@dataclass(frozen=True)
class Shape:
    """What a test asks for: this many hosts, and this many devices on each (0 for the CPU alone)."""

    hosts: int
    per_host: int

    def __str__(self) -> str:
        gpus = f"{self.per_host or 'no'} GPU{'s' * (self.per_host != 1)}"
        return f"1 host with {gpus}" if self.hosts == 1 else f"{self.hosts} hosts with {gpus} each"


@dataclass(frozen=True)
class HostOffer:
    """A host of the cluster: its name there, and how many GPUs tests may use."""

    name: str
    devices: int


@dataclass
class Gang:
    """Hosts that one test uses, all or none of them, in the order of the ranks.

    ``end`` frees them in the launcher, after their agents have ended.
    """

    hosts: Sequence[RemoteHost]
    end: Callable[[], object]

    def lost(self) -> dict[str, str]:
        """Return why each host that was lost was, by name."""
        return {host.name: host.lost for host in self.hosts if host.lost is not None}

    def close(self) -> None:
        """End the agents with everything that they run, and free the hosts."""
        close_all(self.hosts)
        self.end()


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
            LeaseTimeoutError: Others did not free it in time.
            WorkerError: An agent does not start, or its host differs from the others.
        """

    def close(self) -> None:
        """End the launcher, and with it all agents that it has started."""


def choose_shape(request: GpuRequest, offers: Sequence[HostOffer]) -> Shape:
    """Return how many hosts a request needs: without ``per_host`` as few as can hold it in equal shares.

    If no hosts can, the result is one host; the cluster then explains why it cannot provide it.
    """
    if request.per_host is not None:
        return Shape(request.n // request.per_host, request.per_host)
    for hosts in range(1, request.n + 1):
        share, rest = divmod(request.n, hosts)
        if not rest and sum(offer.devices >= share for offer in offers) >= hosts:
            return Shape(hosts, share)
    return Shape(1, request.n)


def explain_never(cluster: str, shape: Shape, offers: Collection[HostOffer], avoid: Mapping[str, str]) -> str:
    """Describe what a cluster has, and which hosts of it are not used."""
    has = ", ".join(f"{each.name} has {each.devices}" for each in offers) or "it has no hosts"
    left_out = "".join(f"; not used: {reason}" for reason in avoid.values())
    return f"{cluster} cannot provide {shape}: {has}{left_out}"


def read_end(log: IO[bytes]) -> str:
    """Return the end of what a launcher has printed, on one line."""
    size = os.fstat(log.fileno()).st_size
    output = os.pread(log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
    return shorten(one_line(output.decode(errors="replace")), QUOTED)
