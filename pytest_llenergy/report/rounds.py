# SPDX-License-Identifier: Apache-2.0
"""The rounds of a test, with what each host of a cluster used, as columns for the terminal and the page."""

from __future__ import annotations

import math

from pytest_llenergy.record.quantity import format_quantity, format_scaled, scale_of
from pytest_llenergy.record.record import LOCALHOST, Record, Round, host_of
from pytest_llenergy.report.text_tables import Column, value_column, with_values


def round_columns(record: Record) -> list[Column[Round]]:
    """Return the columns in which at least one round has a value: energy and time are of the whole round."""
    scale = scale_of("J", *(each.energy_j for each in record.rounds if each.energy_j is not None))
    hosts = list_hosts(record)

    def energy(each: Round) -> str:
        # Hosts beside it are of different devices.
        u_j = each.energy_u_absolute_j if len(hosts) > 1 else each.energy_u_j
        return "-" if each.energy_j is None else format_scaled(each.energy_j, u_j, "J", scale)

    def host_column(host: str) -> Column[Round]:
        return Column(f"{host} ± u", lambda each: describe_host_energy(each, host))

    columns: list[Column[Round]] = [
        value_column("s", "duration_s"),
        Column("energy ± u", energy),
        *(host_column(host) for host in (hosts if len(hosts) > 1 else [])),
        value_column("idle W", "idle_power_w"),
        Column("token", lambda each: str(each.tokens.output) if each.tokens else "-"),
        value_column("°C", "temperature_start_c"),
        value_column("other CPU s", "other_cpu_s"),
        Column("flags", _flag_names, is_number=False),
    ]
    return with_values(columns, record.rounds)


def _flag_names(each: Round) -> str:
    return ",".join(dict.fromkeys(flag.name for flag in each.flags)) or "-"


def describe_host_energy(round_: Round, host: str) -> str:
    """Return the joules of a host in a round, or why it has none.

    Its domains share causes, so their uncertainties and limits are added linearly. As that of the whole
    round, the uncertainty includes the accuracy of the sources, with a rectangular distribution.
    """
    found = [each for domain, each in round_.by_domain.items() if host_of(domain) == host]
    missing = [each.reason or "-" for each in found if each.energy_j is None]
    if missing or not found:
        return missing[0] if missing else "no meter"
    u_j = math.hypot(
        sum(each.energy_u_j or 0.0 for each in found), sum(each.width_j for each in found) / math.sqrt(12)
    )
    return format_quantity(sum(each.energy_j or 0.0 for each in found), u_j, "J")


def list_hosts(record: Record) -> list[str]:
    """Return the hosts of a cluster on which a test ran; empty if it ran on pytest's own."""
    ranks = [rank.host for rank in record.ranks if rank.host != LOCALHOST]
    domains = [host_of(domain) for round_ in record.rounds for domain in round_.by_domain]
    return [host for host in dict.fromkeys([*ranks, *domains]) if host]
