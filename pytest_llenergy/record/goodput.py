# SPDX-License-Identifier: Apache-2.0
"""Which requests of a served load meet its SLO, and the metrics that only such loads have.

A request is good if none of its latencies exceeds its limit, and goodput is the number of good requests
over the duration of the load, as in ``vllm bench serve --goodput`` (``calculate_metrics`` in
vllm/benchmarks/serve.py). DistServe's goodput (Zhong et al., OSDI 2024, arXiv 2401.09670), the highest
request rate at which a share of the requests is good, is what ``energy.max_load`` finds. A failed request is
never good. Joules are those of the whole load: the server spent them on bad requests too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import RoundMetric, is_valid, joules, rate
from pytest_llenergy.record.round_statistics import RoundValue
from pytest_llenergy.record.served import CUT_SHORT

#: Why a load may have no energy for each good request.
NONE_GOOD = "no request met every limit of the SLO"

NO_SLO, NO_SEARCH = "the test serves no load with slo=", "the test has no energy.max_load"


def limits_by_column(slo: Slo) -> dict[str, float]:
    """Return the limits (seconds) by the column of ``ServedRequests`` that they apply to."""
    limits = {
        "time_to_first_token_s": slo.ttft_s,
        "time_per_output_token_s": slo.tpot_s,
        "end_to_end_latency_s": slo.e2e_s,
    }
    return {column: limit for column, limit in limits.items() if limit is not None}


def mark_good_requests(round_: Round, slo: Slo | None) -> Round:
    """Return the round with the good requests of its load marked; unchanged without an SLO."""
    served = round_.served
    if slo is None or served is None:
        return round_
    limits = limits_by_column(slo)
    latencies = zip(*(getattr(served, column) for column in limits), strict=True)
    good = [
        # A request with one output token has no time per output token.
        all(value is None or value <= limit for value, limit in zip(each, limits.values(), strict=True))
        for each in latencies
    ]
    return msgspec.structs.replace(round_, served=msgspec.structs.replace(served, good=good))


def good_requests(round_: Round) -> int | None:
    """Return the number of good requests; ``None`` without an SLO."""
    served = round_.served
    return None if served is None or served.good is None else sum(served.good)


def good_output_tokens(round_: Round) -> int | None:
    """Return the number of output tokens of good requests; ``None`` without an SLO."""
    served = round_.served
    if served is None or served.good is None:
        return None
    return sum(tokens for tokens, good in zip(served.output_tokens, served.good, strict=True) if good)


def attainment(*rounds: Round) -> float | None:
    """Return the share of the requests of these rounds, failed ones included, that are good.

    ``None`` without an SLO.
    """
    loads = [served for round_ in rounds if (served := round_.served) is not None and served.good is not None]
    sent = sum(len(served.sent_s) + len(served.failures) for served in loads)
    return sum(map(sum, (served.good or () for served in loads))) / sent if sent else None


def worst_latency_ratio(rounds: Sequence[Round], slo: Slo) -> float:
    """Return the largest ratio of a latency to its limit, of the requests that ``slo.attainment`` counts.

    Up to 1 if that share of requests meets each limit by itself. 0 without requests.
    """
    ratios = [0.0]
    for column, limit in limits_by_column(slo).items():
        columns = (getattr(round_.served, column) for round_ in rounds if round_.served is not None)
        values = sorted(value for column in columns for value in column if value is not None)
        if values:
            ratios.append(values[math.ceil(slo.attainment * len(values)) - 1] / limit)
    return max(ratios)


def has_flag(round_: Round, *names: str) -> bool:
    """Return whether a round has one of these flags."""
    return any(flag.name in names for flag in round_.flags)


def whole_loads(rounds: Sequence[Round]) -> Sequence[Round]:
    """Return the rounds whose load did not end early; all of them if none of those is valid."""
    whole = [round_ for round_ in rounds if not has_flag(round_, *CUT_SHORT)]
    return whole if any(map(is_valid, whole)) else rounds


def is_mostly(name: str, rounds: Sequence[Round]) -> bool:
    """Return whether half of the rounds or more have a flag."""
    flagged = sum(has_flag(round_, name) for round_ in rounds)
    return flagged > 0 and flagged >= len(rounds) / 2


def _goodput(round_: Round) -> RoundValue | str:
    good = good_requests(round_)
    return rate(good, round_.duration_s) if good is not None else NO_SLO


def _attainment(round_: Round) -> RoundValue | str:
    if good_requests(round_) is None:
        return NO_SLO
    share = attainment(round_)
    return RoundValue(share) if share is not None else "no request was sent"


def _per_good(count: Callable[[Round], int | None], round_: Round) -> RoundValue | str:
    good = count(round_)
    return joules(round_, good) if good else NO_SLO if good is None else NONE_GOOD


def _total_per_good(count: Callable[[Round], int | None], rounds: Sequence[Round]) -> tuple[float, int]:
    """Divide the joules of all rounds by their good requests."""
    known = [round_ for round_ in rounds if round_.energy_j is not None]
    total_j = math.fsum(round_.energy_j or 0.0 for round_ in known)
    return total_j / sum(count(each) or 0 for each in known), len(known)


def _max_load(round_: Round) -> RoundValue | str:
    found = round_.max_load
    if found is None or found.requests_per_s is None:
        return NO_SEARCH if found is None else found.reason or "no maximum load was found"
    # All rounds have the result of one search, so that its uncertainty does not shrink with their number.
    # Both sides of a comparison have the same arrivals.
    arrivals = found.u_arrivals_requests_per_s or 0.0
    return RoundValue(found.requests_per_s, accuracy=arrivals, shape=found.u_requests_per_s or 0.0)


def _energy_per_good(unit: str, count: Callable[[Round], int | None], heading: str) -> RoundMetric:
    of, pooled = partial(_per_good, count), partial(_total_per_good, count)
    return RoundMetric(unit, of, NO_SLO, heading, every=True, pooled=pooled, optional=True)


#: Every metric that only loads with an SLO have, in the order of the report.
GOODPUT_METRICS: dict[str, RoundMetric] = {
    "goodput_requests_per_s": RoundMetric(
        "request/s", _goodput, NO_SLO, "good request/s", "more", optional=True
    ),
    "slo_attainment": RoundMetric("1", _attainment, NO_SLO, "SLO share", "more", optional=True),
    "energy_per_good_request_j": _energy_per_good("J/request", good_requests, "per good request ± u"),
    "energy_per_output_token_at_slo_j": _energy_per_good(
        "J/token", good_output_tokens, "per token at SLO ± u"
    ),
    "max_load_requests_per_s": RoundMetric(
        "request/s", _max_load, NO_SEARCH, "max request/s ± u", "more", every=True, optional=True
    ),
}
