# SPDX-License-Identifier: Apache-2.0
"""What ran on which host of a cluster, and the joules of each: for the tables of one test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llenergy.record.record import LOCALHOST, DomainEnergy, RankInfo, Record, Round, host_of


class HostEnergy(NamedTuple):
    """Joules of a host in one round, with their standard uncertainty, or the reason why it has none.

    As that of the whole round, the uncertainty includes the accuracy of the sources.
    """

    energy_j: float | None
    energy_u_absolute_j: float | None
    reason: str | None = None


def list_hosts(record: Record) -> list[str]:
    """Return the hosts of a cluster on which a test ran; empty if it ran on pytest's own."""
    ranks = [rank.host for rank in record.ranks if rank.host != LOCALHOST]
    domains = [host_of(domain) for round_ in record.rounds for domain in round_.by_domain]
    return [host for host in dict.fromkeys([*ranks, *domains]) if host]


def sum_by_host(hosts: Sequence[str], round_: Round) -> dict[str, HostEnergy]:
    """Add the domains of each host of ``list_hosts``."""
    energies: dict[str, list[DomainEnergy]] = {host: [] for host in hosts}
    for domain, energy in round_.by_domain.items():
        if host := host_of(domain):
            energies[host].append(energy)
    return {host: _sum(each) for host, each in energies.items()}


def _sum(energies: Sequence[DomainEnergy]) -> HostEnergy:
    """Add the domains of a host, which share causes: their uncertainties and limits are added linearly."""
    if not energies:
        return HostEnergy(None, None, "no meter")
    for each in energies:
        if each.energy_j is None:
            return HostEnergy(None, None, each.reason)
    u_j = sum(each.energy_u_j or 0.0 for each in energies)
    width_j = sum(each.width_j for each in energies)
    # A rectangular distribution, as in ``energy.uncertainty.absolute_uncertainty_j``.
    return HostEnergy(
        sum(each.energy_j or 0.0 for each in energies), math.hypot(u_j, width_j / math.sqrt(12))
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
