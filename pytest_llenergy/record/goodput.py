# SPDX-License-Identifier: Apache-2.0
"""Which requests of a served load meet its SLO.

A request is good if none of its latencies exceeds its limit, and goodput is the number of good requests
over the duration of the load, as in ``vllm bench serve --goodput`` (``calculate_metrics`` in
vllm/benchmarks/serve.py). DistServe's goodput (Zhong et al., OSDI 2024, arXiv 2401.09670), the highest
request rate at which a share of the requests is good, is what ``load_search`` finds. A failed request is
never good. Joules are those of the whole load: the server spent them on bad requests too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.served import CUT_SHORT


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


def has_slo(round_: Round) -> bool:
    """Return whether the round is of a load with an SLO."""
    return round_.served is not None and round_.served.good is not None


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
