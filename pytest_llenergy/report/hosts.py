# SPDX-License-Identifier: Apache-2.0
"""What ran on which host of a cluster, and the joules of each: for the tables of one test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_llenergy.model.record import LOCALHOST, DomainEnergy, RankInfo, Record, host_of


class HostEnergy(NamedTuple):
    """Joules of a host in one round or window, with their standard uncertainty, or the reason without."""

    energy_j: float | None
    energy_u_j: float | None
    reason: str | None = None


def sum_by_host(by_domain: Mapping[str, DomainEnergy]) -> dict[str, HostEnergy]:
    """Add the domains of each host; empty for a test on pytest's own host.

    Domains of a host share causes, so that their uncertainties are added, which is the largest that the sum
    can have.
    """
    hosts: dict[str, list[DomainEnergy]] = {}
    for domain, energy in by_domain.items():
        if host := host_of(domain):
            hosts.setdefault(host, []).append(energy)
    return {host: _sum(energies) for host, energies in hosts.items()}


def _sum(energies: Sequence[DomainEnergy]) -> HostEnergy:
    for each in energies:
        if each.energy_j is None:
            return HostEnergy(None, None, each.reason)
    return HostEnergy(
        sum(each.energy_j or 0.0 for each in energies), sum(each.energy_u_j or 0.0 for each in energies)
    )


def place_of(rank: RankInfo) -> str:
    """Return the devices of a rank, with its host unless that is pytest's own."""
    return rank.device if rank.host == LOCALHOST else f"{rank.device} of {rank.host}"


def describe_devices(record: Record) -> str:
    """Return the devices of a test, those of each host of a cluster after its name."""
    hosts: dict[str, list[str]] = {}
    for rank in record.ranks:
        if rank.host != LOCALHOST:
            hosts.setdefault(rank.host, []).append(rank.device)
    listed = [f"{host}: {', '.join(dict.fromkeys(devices))}" for host, devices in hosts.items()]
    return "; ".join(listed) or ", ".join(record.devices) or "-"
