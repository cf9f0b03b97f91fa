# SPDX-License-Identifier: Apache-2.0
"""What a launcher provides: hosts that exist, and gangs of hosts with an agent on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from pytest_llenergy.errors import DeviceError
from pytest_llenergy.hosts.client import AgentClient

#: For gangs that may use all hosts.
NONE_LOST: Mapping[str, str] = MappingProxyType({})


class NeverError(DeviceError):
    """The cluster has no such hosts, busy or not; the message says which it has. The test is skipped."""


class BusyError(DeviceError):
    """The hosts exist but did not become free in time; the message names who holds them."""


@dataclass(frozen=True)
class Shape:
    """What a test asks for: this many hosts, and this many devices on each (0 for the CPU alone).

    ``others`` are shapes that the test would accept too, if there were such hosts.
    """

    hosts: int
    per_host: int
    others: Sequence[Shape] = field(default=(), compare=False)

    def __str__(self) -> str:
        gpus = f"{self.per_host or 'no'} GPU{'s' * (self.per_host != 1)}"
        text = f"1 host with {gpus}" if self.hosts == 1 else f"{self.hosts} hosts with {gpus} each"
        return f"{self.hosts * self.per_host} GPUs, such as {text}" if self.others else text


@dataclass(frozen=True)
class HostOffer:
    """A host of the cluster.

    Attributes:
        name: Its name in the cluster.
        devices: Number of its GPUs that tests may use.
        busy_with: Who uses it, as far as the launcher knows; None if it is free.
    """

    name: str
    devices: int
    busy_with: str | None = None


class Gang(Protocol):
    """Hosts that one test uses, all or none of them."""

    @property
    def hosts(self) -> Sequence[AgentClient]:
        """The agents in the order of the ranks: the ranks of the first host come first."""

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
