# SPDX-License-Identifier: Apache-2.0
"""The points of a curve over load, and the result of a search, from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.goodput import attainment, good_requests, has_flag, is_mostly
from pytest_llenergy.measure.load_probe import is_within
from pytest_llenergy.measure.round_metric import is_valid
from pytest_llenergy.measure.round_statistics import percentile
from pytest_llenergy.model.load_curve import LoadCurve, LoadPoint, MaxLoad, Slo
from pytest_llenergy.model.record import Metric, Round
from pytest_llenergy.model.served import CUT_SHORT, FAILED, REFUSED, SATURATED, SHORT_LOAD

#: Latencies of a point: its columns, and those of ``ServedRequests``.
LATENCIES = {
    "time_to_first_token": "time_to_first_token_s",
    "time_per_output_token": "time_per_output_token_s",
    "end_to_end_latency": "end_to_end_latency_s",
}


def describe_cut(rounds: Sequence[Round]) -> str | None:
    """Return why a round ended early; None if none did."""
    cut = next((each for each in rounds if has_flag(each, *CUT_SHORT)), None)
    if cut is None:
        return None
    # Failed requests may be why so many missed the SLO.
    return "; ".join(f"{flag.name}: {flag.detail}" for flag in cut.flags if flag.name in (*CUT_SHORT, FAILED))


def describe_failed(rounds: Sequence[Round]) -> str | None:
    """Return how many requests failed in the first round in which some did, and why; None if none did."""
    return next((flag.detail for each in rounds for flag in each.flags if flag.name == FAILED), None)


def explain_cut(experiment: Experiment) -> Experiment:
    """Give the metrics that a load lacks because it ended early that reason."""
    cut = describe_cut(experiment.rounds)
    if cut is None:
        return experiment
    metrics = {
        name: metric if metric.value is not None else msgspec.structs.replace(metric, reason=cut)
        for name, metric in experiment.metrics.items()
    }
    return replace(experiment, metrics=metrics)


def make_point(
    rate: float, experiment: Experiment, slo: Slo | None, num_requests: int | None = None
) -> LoadPoint:
    """Return the point of a measured load on the curve; without figures if a round of it ended early."""
    rounds = [round_ for round_ in experiment.rounds if is_valid(round_)]
    if (cut := describe_cut(rounds)) is not None:
        return LoadPoint(
            request_rate=rate,
            requests=num_requests or 0,
            rounds=len(rounds),
            refused=any(has_flag(round_, REFUSED) for round_ in rounds),
            within_slo=is_within(experiment.rounds, slo),
            reason=cut,
        )
    metrics = experiment.metrics
    per_token = metrics.get("energy_per_output_token_j")
    served = [round_.served for round_ in rounds if round_.served is not None]
    # All figures of requests are over those of all rounds, so that none contradicts another.
    seconds = sum(round_.duration_s for round_ in rounds)
    good = [count for round_ in rounds if (count := good_requests(round_)) is not None]
    latencies: dict[str, Any] = {}
    for name, column in LATENCIES.items():
        known = [each for part in served for each in getattr(part, column) if each is not None]
        if known:
            latencies |= {f"{name}_p{percent}_s": percentile(known, percent) for percent in (50, 99)}
    first = experiment.rounds[0].served
    return LoadPoint(
        request_rate=rate,
        requests=len(first.sent_s) + len(first.failures) if first is not None else 0,
        rounds=len(rounds),
        requests_per_s=sum(len(part.sent_s) for part in served) / seconds if seconds else None,
        energy_per_output_token_j=per_token.value if per_token is not None else None,
        energy_per_output_token_u_j=per_token.uncertainty if per_token is not None else None,
        slo_attainment=attainment(*rounds),
        goodput_requests_per_s=sum(good) / seconds if good and seconds else None,
        saturated=is_mostly(SATURATED, rounds),
        short=is_mostly(SHORT_LOAD, rounds),
        within_slo=is_within(experiment.rounds, slo),
        reason=per_token.reason if per_token is not None and per_token.value is None else None,
        **latencies,
    )


def add_max_load(
    experiment: Experiment, curve: LoadCurve, u: float | None, u_arrivals: float | None
) -> Experiment:
    """Add the result of a search to the rounds and metrics of the measurement that ended it.

    Args:
        experiment: The measurement.
        curve: The search's loads and bounds.
        u: Standard uncertainty with the same arrivals.
        u_arrivals: That from the arrivals; None if unknown.
    """
    found, above = curve.max_load_requests_per_s, curve.exceeded_at_requests_per_s
    name = "max_load_requests_per_s"
    if found is None and curve.between is not None:
        low = curve.between[0]
        exceeded = any(each.request_rate == low and each.within_slo is False for each in curve.points)
        above = low if exceeded else None
    bounds = MaxLoad(at_least_requests_per_s=found, below_requests_per_s=above, reason=curve.reason)
    metric = Metric(value=None, unit="request/s", reason=curve.reason)
    if found is not None and above is not None:
        bounds = msgspec.structs.replace(
            bounds, requests_per_s=found, u_requests_per_s=u, u_arrivals_requests_per_s=u_arrivals
        )
        n = sum(map(is_valid, experiment.rounds))
        metric = msgspec.structs.replace(
            metric, value=found, uncertainty=u, uncertainty_absolute=curve.max_load_u_requests_per_s, n=n
        )
    rounds = [msgspec.structs.replace(round_, max_load=bounds) for round_ in experiment.rounds]
    return replace(experiment, rounds=rounds, metrics={**experiment.metrics, name: metric})
