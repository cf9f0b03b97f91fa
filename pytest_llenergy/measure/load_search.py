# SPDX-License-Identifier: Apache-2.0
"""Search for the highest request rate within an SLO.

The search halves the ratio of a bracket until its ends differ by no more than half of the tolerance: the
scatter of latencies, which moves the bracket, has the other half. Both ends of the
result were measured: the lower one is within the SLO, the upper one is not. The ends of the given range are
measured only if every rate between them has the same result.

A rate is measured with one round if the result is clear, otherwise with two, or three if they disagree, since
percentiles of latencies scatter most where a queue begins to grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pytest_llenergy.backends.load_phases import SATURATED
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.goodput import attainment, is_saturated, worst_latency_ratio
from pytest_llenergy.measure.round_metric import is_valid
from pytest_llenergy.model.load_curve import Slo
from pytest_llenergy.model.record import Round

#: Most rounds of a rate that is close to the maximum, and fewest of the maximum itself. Of two rounds, one
#: that the host disturbed would decide.
MAX_PROBE_ROUNDS = 3

#: A round is clearly within the SLO if its latencies are below this share of their limits, and clearly not if
#: it is saturated or this share of the attainment is not reached.
CLEAR = 0.8

#: Most times that a maximum of short measurements is measured in full. Each time that it then fails, the
#: search goes on below, and further each time.
MAX_CONFIRMATIONS = 3

#: Fewest requests of a probe, and most that the attainment alone asks for.
MIN_REQUESTS, MAX_ATTAINMENT_REQUESTS = 32, 100

#: Longest time to send the requests of a probe (seconds). Where a limit needs longer, the rising latencies
#: of a saturated load show first.
MAX_PROBE_S = 60.0

#: Smallest and largest tolerance of a search.
MIN_TOLERANCE, MAX_TOLERANCE = 0.001, 1.0


def probe_requests(rate: float, slo: Slo, tolerance: float) -> int:
    """Return how many requests show whether a load is within the SLO, if the server has a fixed capacity.

    At a rate above capacity by ``tolerance``, request i of an open loop waits i × tolerance / rate seconds.
    The load must be so long that more requests than the attainment allows wait longer than the limit. Time
    per output token does not grow with the queue and needs only enough requests to count.

    Args:
        rate: Requests per second.
        slo: The limits.
        tolerance: Relative tolerance of the search.
    """
    for_attainment = math.ceil(round(1 / (1 - slo.attainment), 6)) if slo.attainment < 1 else math.inf
    least = max(MIN_REQUESTS, min(MAX_ATTAINMENT_REQUESTS, for_attainment))
    waits_s = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    length_s = min(waits_s, default=0.0) * (1 + tolerance) / (tolerance * slo.attainment)
    return max(int(least), math.ceil(rate * min(length_s, MAX_PROBE_S)))


def is_within(rounds: Sequence[Round], slo: Slo | None) -> bool | None:
    """Return whether a load was within the SLO; ``None`` without a valid round.

    The requests of all rounds count together, as in their percentiles. A load that the server cannot keep up
    with in half of the rounds is not within any SLO.
    """
    valid = [round_ for round_ in rounds if is_valid(round_)]
    if not valid:
        return None
    if is_saturated(valid) or slo is None:
        return not is_saturated(valid)
    return (attainment(*valid) or 0.0) >= slo.attainment


def is_decided(rounds: Sequence[Round], slo: Slo) -> bool:
    """Return whether these rounds of a rate decide whether it is within the SLO."""
    valid = [round_ for round_ in rounds if is_valid(round_)]
    if len(rounds) >= MAX_PROBE_ROUNDS:
        return True
    results = [is_within([round_], slo) for round_ in valid]
    if len(results) > 1:
        # They agree, so that their requests together do.
        return results[0] == results[1]
    return bool(valid) and _is_clear(valid[0], slo)


def _is_clear(round_: Round, slo: Slo) -> bool:
    if any(flag.name == SATURATED for flag in round_.flags):
        return True
    share = attainment(round_) or 0.0
    if share >= slo.attainment:
        return worst_latency_ratio([round_], slo) <= CLEAR
    return share < CLEAR * slo.attainment


@dataclass
class LoadSearch:
    """The state of a search.

    Attributes:
        low: Lowest rate (requests per second).
        high: Highest rate.
        tolerance: Relative error that the result may have.
        within: Rates that were within the SLO, ascending, below ``exceeded``.
        exceeded: Lowest rate that was not, and above which nothing is searched.
        stopped: Why the search ended early.
    """

    low: float
    high: float
    tolerance: float
    within: list[float] = field(default_factory=list)
    exceeded: float | None = None
    stopped: str | None = None

    @staticmethod
    def between(bounds: Sequence[float], tolerance: float) -> LoadSearch:
        """Return a search between two rates.

        Raises:
            PlanError: The rates or the tolerance are invalid.
        """
        rates = list(bounds) if isinstance(bounds, (list, tuple)) else []
        is_range = len(rates) == 2 and all(_is_number(rate) for rate in rates) and 0 < rates[0] < rates[1]
        if not is_range or not math.isfinite(rates[1]):
            raise PlanError(
                f"max_load: between is {bounds!r}, needs the lowest and the highest request rate, such as "
                "(0.5, 32.0)"
            )
        if not _is_number(tolerance) or not MIN_TOLERANCE <= tolerance <= MAX_TOLERANCE:
            raise PlanError(
                f"max_load: tolerance is {tolerance!r}, needs a share from {MIN_TOLERANCE} to "
                f"{MAX_TOLERANCE:g}, such as 0.05"
            )
        return LoadSearch(float(rates[0]), float(rates[1]), tolerance)

    @property
    def maximum(self) -> float | None:
        """Highest rate found within the SLO."""
        return self.within[-1] if self.within else None

    @property
    def steps(self) -> int:
        """Most rates that are measured until the bracket is as narrow as the tolerance."""
        return max(1, math.ceil(math.log2(math.log(self.high / self.low) / math.log(self._narrow)))) + 1

    @property
    def _narrow(self) -> float:
        """Ratio of the bracket's ends at which the search ends."""
        return 1 + self.tolerance / 2

    def next_rate(self) -> float | None:
        """Return the rate to measure next; ``None`` if the bracket is narrow enough, or at an end."""
        low = self.low if self.maximum is None else self.maximum
        high = self.high if self.exceeded is None else self.exceeded
        if high / low > self._narrow * (1 + 1e-9):
            return math.sqrt(low * high)
        if self.maximum is None:
            return self.low if self.exceeded != self.low else None
        return self.high if self.exceeded is None and self.maximum != self.high else None

    def add(self, rate: float, *, within: bool) -> None:
        """Take in the result of a rate."""
        if within:
            self.within.append(rate)
            self.within.sort()
            return
        self.exceeded = rate if self.exceeded is None else min(self.exceeded, rate)
        self.within = [each for each in self.within if each < rate]

    def run(
        self,
        probe: Callable[[float], bool],
        confirm: Callable[[float], bool],
        may_go_on: Callable[[], bool],
        stop_reason: str,
    ) -> None:
        """Search, and measure the maximum in full.

        Args:
            probe: Measures a rate briefly; returns whether it is within the SLO.
            confirm: Measures a rate in full.
            may_go_on: Returns whether there is time for another probe.
            stop_reason: Why the search ends if there is not.
        """
        confirmed: set[float] = set()
        for failures in range(MAX_CONFIRMATIONS):
            # Where short measurements were wrong once, only full ones count.
            measure = confirm if failures else probe
            while (rate := self.next_rate()) is not None:
                if not may_go_on():
                    self.stopped = stop_reason
                    break
                within = measure(rate)
                self.add(rate, within=within)
                confirmed |= {rate} if within and failures else set()
            found = self.maximum
            if found is None or found in confirmed or confirm(found):
                return
            self.add(found, within=False)
            doubtful = found / (1 + self.tolerance) ** (2 ** (failures + 1))
            self.within = [each for each in self.within if each in confirmed or each <= doubtful]
        self.within = []
        self.stopped = (
            f"the latencies scatter: {MAX_CONFIRMATIONS} rates met the SLO in a short measurement and not in "
            "a full one; send more requests (num_requests), or relax the SLO"
        )

    def describe_end(self) -> str | None:
        """Return why a bound of the maximum is missing or the bracket wide; ``None`` if all is well."""
        if self.stopped is not None:
            return self.stopped
        if self.maximum is None:
            return f"even {self.low:g} request/s, the lowest rate, is not within the SLO; search lower rates"
        if self.exceeded is None:
            return f"even {self.high:g} request/s, the highest rate, is within the SLO; search higher rates"
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
