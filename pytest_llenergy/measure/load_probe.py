# SPDX-License-Identifier: Apache-2.0
"""How long the loads of a search are, and what their rounds show.

Rounds of a rate have different arrivals, so that no single burst decides, and their requests count together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.goodput import attainment, has_flag, is_mostly, worst_latency_ratio
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.served import CUT_SHORT, ENDED_EARLY, OUT_OF_TIME, REFUSED, SATURATED, SHORT_LOAD

#: Most rounds of a rate in a search, and fewest of the maximum itself unless they are long.
MAX_PROBE_ROUNDS = 3

#: Requests of all rounds of a rate together, in times of what one bad request needs.
POOLED_TIMES = 3

#: A rate whose latencies are below this share of their limits in the first round needs no other one: the
#: arrivals of others seldom double them.
CLEAR = 0.5

#: Fewest requests of a load, and of one of which every request must be good.
MIN_REQUESTS, MIN_REQUESTS_FOR_ALL = 32, 100

#: Share of ``--energy-timeout`` that a load may take, with what is done before and after it.
TIMEOUT_SHARE = 0.9

#: Length of a load that was too short for a steady state when it is sent again, in times of a request: three
#: for the steady state, one before it, and a margin.
STEADY_TIMES = 5.0


def required_requests(slo: Slo) -> int:
    """Return the fewest requests of which one can miss the SLO; 1 if none may."""
    return math.ceil(round(1 / (1 - slo.attainment), 6)) if slo.attainment < 1 else 1


def required_seconds(slo: Slo, tolerance: float) -> float:
    """Return how long a load must be to show that its rate is above capacity by ``tolerance`` (seconds).

    Then request i of an open loop waits i × tolerance / rate seconds. The load must be so long that more
    requests than the attainment allows wait longer than the limit. Time per output token does not grow with
    the queue.
    """
    waits_s = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    return min(waits_s, default=0.0) * (1 + 1 / tolerance) / slo.attainment


def probe_requests(rate: float, slo: Slo, tolerance: float) -> int:
    """Return how many requests a load needs.

    Args:
        rate: Requests per second.
        slo: The limits.
        tolerance: Relative tolerance of the search.
    """
    least = required_requests(slo) if slo.attainment < 1 else MIN_REQUESTS_FOR_ALL
    return max(MIN_REQUESTS, least, math.ceil(rate * required_seconds(slo, tolerance)))


def probe_rounds(requests: int, slo: Slo) -> int:
    """Return how many rounds of so many requests decide about a rate."""
    least = required_requests(slo) if slo.attainment < 1 else MIN_REQUESTS_FOR_ALL
    pooled = POOLED_TIMES * max(MIN_REQUESTS, least)
    return min(MAX_PROBE_ROUNDS, math.ceil(pooled / requests))


def allowed_misses(requests: int, slo: Slo) -> int:
    """Return how many of these requests may miss the SLO."""
    return math.floor(requests * (1 - slo.attainment) + 1e-9)


def steady_requests(rounds: Sequence[Round], rate: float, requests: int) -> int:
    """Return how many requests give a load a steady state that was too short for one.

    Args:
        rounds: Its rounds.
        rate: Its requests per second.
        requests: Requests that each round had.
    """
    took_s = [
        latency_s
        for round_ in rounds
        if round_.served is not None
        for latency_s in round_.served.end_to_end_latency_s
    ]
    # The mean over those that are in flight at a time, of which more are long.
    mean_s = math.fsum(each**2 for each in took_s) / max(math.fsum(took_s), 1e-9)
    return max(2 * requests, math.ceil(rate * STEADY_TIMES * mean_s))


def is_within(rounds: Sequence[Round], slo: Slo | None) -> bool | None:
    """Return whether a load was within the SLO, which the requests of all rounds together decide.

    A load that the server cannot keep up with in half of the rounds is not within any SLO. ``None`` if that
    is not known: without a valid round, or if half of them have no steady state or one ran out of time.
    """
    valid = [round_ for round_ in rounds if is_valid(round_)]
    if any(has_flag(each, ENDED_EARLY, REFUSED) for each in valid) or is_mostly(SATURATED, valid):
        return False
    if not valid or is_mostly(SHORT_LOAD, valid) or any(has_flag(each, OUT_OF_TIME) for each in valid):
        return None
    return slo is None or (attainment(*valid) or 0.0) >= slo.attainment


def is_decided(rounds: Sequence[Round], slo: Slo, needed: int) -> bool:
    """Return whether these rounds of a rate decide whether it is within the SLO.

    Args:
        rounds: The rounds so far, of equal length.
        slo: The limits.
        needed: Valid rounds that decide in any case.
    """
    valid = [round_ for round_ in rounds if is_valid(round_)]
    if len(valid) >= needed or len(rounds) >= MAX_PROBE_ROUNDS:
        return True
    if any(has_flag(each, *CUT_SHORT, SATURATED, SHORT_LOAD) for each in valid[-1:]):
        return True
    if not valid:
        return False
    missed = (1 - (attainment(*valid) or 0.0)) * len(valid)
    if missed > (1 - slo.attainment) * needed * (1 + 1e-9):
        return True
    return missed <= (1 - slo.attainment) * len(valid) and worst_latency_ratio(valid, slo) <= CLEAR


def check_requests(given: int | None, slo: Slo) -> None:
    """Check the number of requests that a test asks for.

    Raises:
        PlanError: It is too small for the attainment.
    """
    least = required_requests(slo)
    if isinstance(given, int) and given < least:
        raise PlanError(
            f"max_load: num_requests is {given}, needs {least} or more, because {slo.attainment * 100:g} % "
            "of fewer requests is all of them; or lower the attainment of slo()"
        )


def check_length(slo: Slo, tolerance: float, budget_s: float, timeout_s: float, steps: int) -> None:
    """Check that loads of the length that the tolerance needs fit into the time limits.

    Args:
        slo: The limits.
        tolerance: Relative tolerance of the search.
        budget_s: Seconds that the search may take.
        timeout_s: Longest time of a load (seconds).
        steps: Most rates that are measured.

    Raises:
        PlanError: Not even one fits.
    """
    needed_s = required_seconds(slo, tolerance)
    limits = [f"budget={budget_s:g}"] if needed_s > budget_s else []
    limits += (
        [f"nine tenths of --energy-timeout={timeout_s:g}"] if needed_s > TIMEOUT_SHARE * timeout_s else []
    )
    if not limits:
        return
    remedies = [f"budget={_round_up(steps * needed_s)}"]
    if needed_s > TIMEOUT_SHARE * timeout_s:
        remedies[0] += f" and --energy-timeout={_round_up(needed_s / TIMEOUT_SHARE)}"
    # Half of the budget, so that a few loads fit.
    spare_s = min(budget_s / 4, TIMEOUT_SHARE * timeout_s)
    shortest_s = required_seconds(slo, math.inf)
    wider = shortest_s / (spare_s - shortest_s) if spare_s > shortest_s else math.inf
    if wider <= 1:
        remedies.append(f"tolerance={math.ceil(wider * 100) / 100:g}")
    raise PlanError(
        f"max_load: a load that shows a rate above capacity by tolerance={tolerance:g} takes {needed_s:.0f} "
        f"s with {slo}, more than {' and '.join(limits)}; give {' or '.join(remedies)}"
    )


def _round_up(seconds: float) -> int:
    return 100 * math.ceil(seconds / 100)
