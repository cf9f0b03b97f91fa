# SPDX-License-Identifier: Apache-2.0
"""Power over time in one round of a test."""

from __future__ import annotations

from pytest_llenergy.record.base import EnergyKind, StoredStruct


class DomainPower(StoredStruct, frozen=True):
    """Power of one domain over time: ``power_w[i]`` is the mean from ``edges_s[i]`` to ``edges_s[i + 1]``.

    Edges are seconds from the start of the round, negative before it. They include the start, 0, and the end
    of the round, between which the integral is the energy of the round. The others are ticks of the counter,
    thinned out if there are many. Power is that of the whole domain, also if its energy is attributed.
    """

    kind: EnergyKind
    edges_s: list[float]
    power_w: list[float]


class PhaseSpan(StoredStruct, frozen=True):
    """A phase of one iteration, in seconds from the start of the round."""

    name: str
    start_s: float
    end_s: float


class PowerTrace(StoredStruct, frozen=True):
    """Power over time in one round, and right before and after it.

    The round is the valid one of median energy, with its ``start_s`` (monotonic) and ``duration_s``.
    ``spans`` are its phases in order, and empty if the backend does not report them or if there are too many
    to draw.
    """

    start_s: float
    duration_s: float
    by_domain: dict[str, DomainPower]
    spans: list[PhaseSpan] = []
