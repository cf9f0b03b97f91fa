# SPDX-License-Identifier: Apache-2.0
"""Limits of the latencies of served requests (SLO), and loads at several rates."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import LARGEST, Count, Number, StoredStruct

#: Share of requests that must meet every limit unless the test gives one. With a single limit, the 99th
#: percentile of the latency is then the figure to compare with it.
ATTAINMENT = 0.99


class Slo(StoredStruct, frozen=True):
    """Service level objective: limits of each request's latencies, and the share of requests within them.

    A latency equal to its limit is within it. At least one limit is given.

    Attributes:
        ttft_s: Limit of the time to first token.
        tpot_s: Limit of the time per output token: the request's mean gap between tokens after the first. A
            request with one output token has no gap and is within it.
        e2e_s: Limit of the end-to-end latency.
        attainment: Share of requests that must meet every limit for a load to be within the SLO.
    """

    ttft_s: Number | None = None
    tpot_s: Number | None = None
    e2e_s: Number | None = None
    attainment: Number = ATTAINMENT

    def __post_init__(self) -> None:
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        if all(limit is None for limit in limits.values()):
            raise ValueError("slo needs a limit: ttft, tpot or e2e, in seconds")
        for name, limit in limits.items():
            if limit is not None and not 0 < limit <= LARGEST:
                raise ValueError(
                    f"slo: {name} is {limit}, needs seconds, more than 0; leave it out for no limit"
                )
        if not 0 < self.attainment <= 1:
            raise ValueError(
                f"slo: attainment is {self.attainment}, needs a share above 0 and up to 1, such as 0.99"
            )

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        named = ", ".join(f"{name} <= {limit:g} s" for name, limit in limits if limit is not None)
        return f"{named} for {self.attainment * 100:g} %"


def slo(
    ttft: float | None = None,
    tpot: float | None = None,
    e2e: float | None = None,
    attainment: float = ATTAINMENT,
) -> Slo:
    """Return limits of the latencies of a served load, ``energy(backend.serve, ..., slo=slo(ttft=0.5))``.

    Args:
        ttft: Longest time to first token (seconds).
        tpot: Longest time per output token after the first (seconds), a mean over the request.
        e2e: Longest end-to-end latency (seconds).
        attainment: Share of requests that must meet every limit for a load to be within the SLO.

    Raises:
        PlanError: No limit is given, or a number is invalid.
    """
    given = {"ttft": ttft, "tpot": tpot, "e2e": e2e, "attainment": attainment}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise PlanError(f"slo: {name} is {value!r}, needs a number")
    try:
        return Slo(ttft_s=ttft, tpot_s=tpot, e2e_s=e2e, attainment=attainment)
    except ValueError as error:
        raise PlanError(str(error)) from None


class LoadPoint(StoredStruct, frozen=True):
    """A load at one request rate. Latencies (s), rates and shares are over the requests of all valid rounds.

    Attributes:
        request_rate: Requests per second, as sent.
        requests: Requests of a round.
        rounds: Number of rounds.
        requests_per_s: Requests per second, as answered.
        energy_per_output_token_u_j: Standard uncertainty (k = 1) for comparing points of one curve; None with
            a single round.
        goodput_requests_per_s: Requests per second that meet every limit.
        slo_attainment: Share of requests that meet every limit.
        saturated: Whether the server could not keep up in half of the rounds or more.
        short: Whether half of the rounds or more were too short for a steady state.
        refused: Whether more requests of a search's load failed than ``max_failures``.
        within_slo: Whether the load was neither saturated nor refused, and enough requests met every limit;
            without an SLO, whether it was not saturated. None if that is not known: without a valid round, if
            the load is ``short``, or if the budget of a search ended it.
        reason: Why a figure is missing. A load that a search ended early has none.
    """

    request_rate: Number
    requests: Count = 0
    rounds: Count = 0
    requests_per_s: Number | None = None
    energy_per_output_token_j: Number | None = None
    energy_per_output_token_u_j: Number | None = None
    time_to_first_token_p50_s: Number | None = None
    time_to_first_token_p99_s: Number | None = None
    time_per_output_token_p50_s: Number | None = None
    time_per_output_token_p99_s: Number | None = None
    end_to_end_latency_p50_s: Number | None = None
    end_to_end_latency_p99_s: Number | None = None
    slo_attainment: Number | None = None
    goodput_requests_per_s: Number | None = None
    saturated: bool = False
    short: bool = False
    refused: bool = False
    within_slo: bool | None = None
    reason: str | None = None


class LoadCurve(StoredStruct, frozen=True):
    """Loads of one test at several rates, in the order of their measurement.

    Attributes:
        between: Lowest and highest rate of a search for the maximum load; None for given rates.
        max_load_requests_per_s: Highest rate that the search found to be within the SLO.
        max_load_u_requests_per_s: Its standard uncertainty, with that from the arrivals if known.
        exceeded_at_requests_per_s: Lowest rate above it that was not within the SLO.
        reason: Why the search found no maximum, or only one of its bounds, or what its uncertainty lacks.
    """

    points: list[LoadPoint]
    slo: Slo | None = None
    between: tuple[Number, Number] | None = None
    max_load_requests_per_s: Number | None = None
    max_load_u_requests_per_s: Number | None = None
    exceeded_at_requests_per_s: Number | None = None
    reason: str | None = None

    def by_rate(self) -> Sequence[LoadPoint]:
        """Return the points by rate; of a rate that was measured again, in that order."""
        return sorted(self.points, key=lambda point: point.request_rate)


def describe_max_load(curve: LoadCurve) -> str:
    """Return the result of a search in one line, such as ``9.8 ± 1.2 request/s (10.1 exceeds it)``."""
    found, above = curve.max_load_requests_per_s, curve.exceeded_at_requests_per_s
    if found is None:
        return f"no maximum load: {curve.reason}"
    u = curve.max_load_u_requests_per_s
    bound = (
        f"{found:.3g}{f' ± {u:.2g}' if u is not None else ''} request/s ({above:.3g} exceeds it)"
        if above is not None
        else f">= {found:.3g} request/s"
    )
    return f"maximum load {bound}" + (f"; {curve.reason}" if curve.reason else "")


class MaxLoad(StoredStruct, frozen=True):
    """Result of a search for the highest request rate within an SLO.

    Attributes:
        requests_per_s: The rate; None if the search did not find both of its bounds.
        u_requests_per_s: Its standard uncertainty with the same arrivals: the search's bracket, and
            measurements that contradict each other.
        u_arrivals_requests_per_s: Standard uncertainty from the arrivals; None if unknown.
        at_least_requests_per_s: Highest rate that was within the SLO.
        below_requests_per_s: Lowest rate above it that was not.
        reason: Why the search did not find the rate.
    """

    requests_per_s: Number | None = None
    u_requests_per_s: Number | None = None
    u_arrivals_requests_per_s: Number | None = None
    at_least_requests_per_s: Number | None = None
    below_requests_per_s: Number | None = None
    reason: str | None = None
