# SPDX-License-Identifier: Apache-2.0
"""How far the maximum load of a few rounds may be from that of other arrivals.

Each round has other arrivals, and with them another maximum. That of a single round is where its latencies
reach the limit. They are known at the rate of the maximum, and how fast they rise is known from a lower rate
with the same arrivals. The largest difference of two rounds is the standard uncertainty, more than their
standard deviation: the bursts that decide are rare, so that rounds without one agree with each other and are
all too high. Nor does a load show that its rate is above capacity by less than the search's tolerance, or by
less than saturation needs, if its queue breaks no limit.
``benchmarks/plugin/serving/max_load_run.py`` shows how often twice this uncertainty covers the maximum of an
endless load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from pytest_llenergy.backends.load_phases import KEEPS_UP
from pytest_llenergy.measure.load_probe import required_seconds
from pytest_llenergy.record.goodput import worst_latency_ratio
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid

#: The lower rate is below the maximum by this factor or more, because between closer ones latencies rise in
#: steps. The second is the margin of one that is measured for it.
FARTHER, MARGIN = 1.2, 1.01

#: Latencies below this share of the limit tell nothing of how fast they rise, and the smallest rise that is
#: assumed: latencies are proportional to the root of the rate.
SMALLEST_RATIO, SMALLEST_RISE = 0.05, 0.5


def lower_rate(rate: float, within: Iterable[float]) -> float | None:
    """Return the rate to measure so that the rise of latencies is known.

    ``None`` if one of the rates ``within`` the SLO is low enough.
    """
    return None if any(each * FARTHER <= rate for each in within) else rate / (FARTHER * MARGIN)


def arrivals_uncertainty(
    rate: float,
    rounds: Sequence[Round],
    lower: Mapping[float, Sequence[Round]],
    slo: Slo,
    tolerance: float,
    exceeding: Sequence[Round] = (),
) -> float | None:
    """Return the standard uncertainty of a maximum load from its arrivals (requests per second).

    Args:
        rate: The maximum.
        rounds: Its rounds.
        lower: The rounds of other rates that were within the SLO.
        slo: The limits.
        tolerance: Relative tolerance of the search.
        exceeding: The rounds of the rate that exceeded the SLO, if it has any.

    Returns:
        ``None`` if there are fewer than two rounds, or no rate is low enough.
    """
    at_maximum = _ratios(rounds, slo)
    rates = {each: found for each in lower if each * FARTHER <= rate and (found := _ratios(lower[each], slo))}
    if len(at_maximum) < 2 or not rates:
        return None
    below = max(rates)
    same = min(len(at_maximum), len(rates[below]))
    rise = (fmean(at_maximum[:same]) - fmean(rates[below][:same])) / math.log(rate / below)
    scatter = (max(at_maximum) - min(at_maximum)) / max(rise, SMALLEST_RISE)
    shows = _shows_queue(rate, rounds, slo, tolerance) or _breaks_tpot(exceeding, slo)
    # Otherwise only saturation decides, which needs a rate that is further above capacity.
    unseen = 0.0 if shows else 1 / KEEPS_UP - 1
    return rate * math.hypot(scatter, tolerance / math.sqrt(3), unseen / math.sqrt(3))


def _shows_queue(rate: float, rounds: Iterable[Round], slo: Slo, tolerance: float) -> bool:
    """Return whether a load is so long that its queue breaks a limit above capacity."""
    loads = [served for each in rounds if (served := each.served) is not None]
    length_s = max(len(served.sent_s) + len(served.failures) for served in loads) / rate
    return 0 < required_seconds(slo, tolerance) <= length_s * (1 + 1e-9)


def _breaks_tpot(rounds: Sequence[Round], slo: Slo) -> bool:
    """Return whether the time per output token of a load exceeds its limit, which needs no queue."""
    if slo.tpot_s is None:
        return False
    limit = msgspec.structs.replace(slo, ttft_s=None, e2e_s=None)
    return worst_latency_ratio(rounds, limit) > 1


def _ratios(rounds: Iterable[Round], slo: Slo) -> list[float]:
    """Return for each round the logarithm of the ratio that ``worst_latency_ratio`` gives."""
    complete = (each for each in rounds if is_valid(each) and each.served is not None)
    return [math.log(max(worst_latency_ratio([each], slo), SMALLEST_RATIO)) for each in complete]
