# SPDX-License-Identifier: Apache-2.0
"""Joules by role, where the prefill and the decode workers of a server have devices of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from pytest_llenergy.record.metrics import METRICS_WITHOUT_ROUNDS, compute_metrics
from pytest_llenergy.record.record import DomainEnergy, Metric, Round, Terms, without_host

#: The metrics of each role, and those of rounds with only its joules that give their values.
ROLE_METRICS = {
    "prefill": {
        "prefill_workers_energy_j": "energy_j",
        "prefill_workers_energy_per_input_token_j": "energy_per_input_token_j",
    },
    "decode": {
        "decode_workers_energy_j": "energy_j",
        "decode_workers_energy_per_output_token_j": "energy_per_output_token_j",
    },
}


def role_metrics(
    rounds: Sequence[Round],
    roles: Mapping[str, Sequence[int]],
    devices: Sequence[str],
    coverage: float = 1.0,
    planned: int | None = None,
) -> dict[str, Metric]:
    """Return the joules of each role in an iteration, and of one of its tokens.

    Args:
        rounds: All rounds.
        roles: Positions in ``devices`` by role.
        devices: The leased devices.
        coverage: As for ``compute_metrics``.
        planned: As for ``compute_metrics``.
    """
    metrics: dict[str, Metric] = {}
    for role, names in ROLE_METRICS.items():
        domains = [_domain_of(devices[position], rounds) for position in roles[role]]
        reason = _explain_missing(domains, rounds)
        if reason is not None:
            metrics |= {
                name: Metric(None, METRICS_WITHOUT_ROUNDS[name].unit, reason=reason) for name in names
            }
            continue
        found = compute_metrics([_restrict(each, domains) for each in rounds], None, coverage, planned)
        metrics |= {name: found[source] for name, source in names.items()}
    return metrics


def _domain_of(device: str, rounds: Sequence[Round]) -> str:
    """Return the domain of a GPU, whose name may begin with a host."""
    names = (name for round_ in rounds for name in round_.by_domain)
    return next((name for name in names if without_host(name) == f"gpu:{device}"), f"gpu:{device}")


def _explain_missing(domains: Sequence[str], rounds: Sequence[Round]) -> str | None:
    """Return why the joules of these domains cannot be told from others, or None if they can."""
    read = list(dict.fromkeys(name for round_ in rounds for name in round_.by_domain))
    missing = [domain for domain in domains if domain not in read]
    if not missing:
        return None
    named = ", ".join(dict.fromkeys(each.partition(":")[2] for each in missing))
    return f"no meter reads {named} apart from the rest; read: {', '.join(read) or 'nothing'}"


def _restrict(round_: Round, domains: Sequence[str]) -> Round:
    """Return a round with the joules of these domains only."""
    parts = [round_.by_domain[name] for name in domains if name in round_.by_domain]
    missing = next((part.reason for part in parts if part.energy_j is None), None)
    terms = _add_terms(parts)
    u_j = math.hypot(*msgspec.structs.astuple(terms))
    width_j = sum(part.width_j for part in parts)
    whole = len(parts) == len(domains) and all(part.energy_j is not None for part in parts)
    return msgspec.structs.replace(
        round_,
        energy_j=sum(part.energy_j or 0.0 for part in parts) if whole else None,
        energy_u_j=u_j if whole else None,
        energy_u_absolute_j=math.hypot(u_j, width_j / math.sqrt(12)) if whole else None,
        terms=terms if whole else None,
        phases=[],
        served=None,
        reason=None if whole else missing or "a domain of the role was not read",
    )


def _add_terms(parts: Sequence[DomainEnergy]) -> Terms:
    """Add uncertainties for boards that share the course of power and, at worst, the clock."""
    terms = [part.terms for part in parts if part.terms is not None]
    sums = {name: math.hypot(*(getattr(each, name) for each in terms)) for name in Terms.__struct_fields__}
    shared = {name: sum(getattr(each, name) for each in terms) for name in ("shape_j", "clock_j")}
    return Terms(**{**sums, **shared})
