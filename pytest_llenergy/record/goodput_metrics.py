# SPDX-License-Identifier: Apache-2.0
"""Metrics of served loads with an SLO, and the highest load within it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from pytest_llenergy.record.goodput import attainment, good_output_tokens, good_requests, has_slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import RoundMetric, joules, rate
from pytest_llenergy.record.round_statistics import RoundValue

#: Why a load may have no energy for each good request.
NONE_GOOD = "no request met every limit of the SLO"

NO_SLO = "the test serves no load with slo="


def _goodput(round_: Round) -> RoundValue | None:
    good = good_requests(round_)
    return rate(good, round_.duration_s) if good is not None else None


def _attainment(round_: Round) -> RoundValue | None:
    share = attainment(round_)
    return RoundValue(share) if share is not None else None


def _per_good(count: Callable[[Round], int | None], round_: Round) -> RoundValue | None:
    return joules(round_, count(round_) or 0)


def _lacks_good(count: Callable[[Round], int | None], round_: Round) -> str | None:
    return None if count(round_) else NONE_GOOD


def _total_per_good(count: Callable[[Round], int | None], rounds: Sequence[Round]) -> tuple[float, int]:
    """Divide the joules of all rounds by their good requests."""
    known = [round_ for round_ in rounds if round_.energy_j is not None]
    total_j = math.fsum(round_.energy_j or 0.0 for round_ in known)
    return total_j / sum(count(each) or 0 for each in known), len(known)


def _max_load(round_: Round) -> RoundValue | None:
    found = round_.max_load
    if found is None or found.requests_per_s is None:
        return None
    # All rounds have the result of one search, so that its uncertainty does not shrink with their number.
    # Both sides of a comparison have the same arrivals.
    arrivals = found.u_arrivals_requests_per_s or 0.0
    return RoundValue(found.requests_per_s, accuracy=arrivals, shape=found.u_requests_per_s or 0.0)


def _lacks_max_load(round_: Round) -> str | None:
    found = round_.max_load
    if found is not None and found.requests_per_s is not None:
        return None
    return (found.reason if found is not None else None) or "no maximum load was found"


#: Every metric that only loads with an SLO have, in the order of the report.
GOODPUT_METRICS: dict[str, RoundMetric] = {
    "goodput_requests_per_s": RoundMetric(
        "request/s",
        _goodput,
        heading="good request/s",
        better="more",
        applies=has_slo,
        optional=True,
        needs=NO_SLO,
    ),
    "slo_attainment": RoundMetric(
        "1",
        _attainment,
        "no request was sent",
        "SLO share",
        "more",
        applies=has_slo,
        optional=True,
        needs=NO_SLO,
    ),
    "energy_per_good_request_j": RoundMetric(
        "J/request",
        partial(_per_good, good_requests),
        NONE_GOOD,
        "per good request ± u",
        applies=has_slo,
        lacks=partial(_lacks_good, good_requests),
        pooled=partial(_total_per_good, good_requests),
        optional=True,
        needs=NO_SLO,
    ),
    "energy_per_output_token_at_slo_j": RoundMetric(
        "J/token",
        partial(_per_good, good_output_tokens),
        NONE_GOOD,
        "per token at SLO ± u",
        applies=has_slo,
        lacks=partial(_lacks_good, good_output_tokens),
        pooled=partial(_total_per_good, good_output_tokens),
        optional=True,
        needs=NO_SLO,
    ),
    "max_load_requests_per_s": RoundMetric(
        "request/s",
        _max_load,
        heading="max request/s ± u",
        better="more",
        applies=lambda round_: round_.max_load is not None,
        lacks=_lacks_max_load,
        optional=True,
        needs="the test has no energy.max_load",
    ),
}
