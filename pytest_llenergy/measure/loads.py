# SPDX-License-Identifier: Apache-2.0
"""Search for the highest request rate within an SLO: which rates, how long their loads are, what they show.

The search halves the ratio of a bracket until its ends differ by no more than half of the tolerance: the
scatter of latencies, which moves the bracket, has the other half. Both ends of the result were measured: the
lower one is within the SLO, the upper one is not. The ends of the given range are measured only if every rate
between them has the same result. Rounds of a rate have different arrivals, so that no single burst decides,
and their requests count together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from pytest_llenergy.backends.load_phases import KEEPS_UP
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.goodput import attainment, has_flag, is_mostly, worst_latency_ratio
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.served import CUT_SHORT, SATURATED, SHORT_LOAD

#: Most times that a maximum of short measurements is measured in full. Each time that it then fails, the
#: search goes on below, and further each time.
MAX_CONFIRMATIONS = 3

#: Smallest and largest tolerance of a search.
MIN_TOLERANCE, MAX_TOLERANCE = 0.001, 1.0

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

#: How fast latencies rise is seen from a rate that is lower by this factor or more if there is one, because
#: between closer ones they rise in steps.
FARTHER = 1.2

#: Latencies below this share of the limit tell nothing of how fast they rise, and the smallest rise that is
#: assumed: latencies are proportional to the root of the rate.
SMALLEST_RATIO, SMALLEST_RISE = 0.05, 0.5


@dataclass
class LoadSearch:
    """The state of a search.

    Attributes:
        low: Lowest rate (requests per second).
        high: Highest rate.
        tolerance: Relative error that the result may have.
        within: Rates that were within the SLO, ascending, below ``exceeded``.
        exceeded: Lowest rate that was not, and above which nothing is searched.
        held: Highest rate that was within the SLO in any measurement, even if a lower one exceeded it.
        stopped: Why the search ended early.
    """

    low: float
    high: float
    tolerance: float
    within: list[float] = field(default_factory=list)
    exceeded: float | None = None
    held: float = 0.0
    stopped: str | None = None

    @staticmethod
    def between(bounds: Sequence[float], tolerance: float) -> LoadSearch:
        """Return a search between two rates.

        Raises:
            PlanError: The rates or the tolerance are invalid.
        """
        rates = list(bounds) if isinstance(bounds, (list, tuple)) else []
        if len(rates) != 2 or not all(map(_is_number, rates)) or not 0 < rates[0] < rates[1] < math.inf:
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
    def uncertainty(self) -> float | None:
        """Standard uncertainty of the maximum (requests per second); None unless both bounds are known.

        The maximum is anywhere from the rate that holds, its value, to the one that exceeds the SLO: the
        width over the root of 3. If a higher rate once held, so that measurements contradict each other, it
        is anywhere between these two as well: the width over the root of 12. Both are rectangular
        distributions (GUM, JCGM 100:2008, 4.3.7).
        """
        if self.maximum is None or self.exceeded is None:
            return None
        contradicted = max(0.0, self.held - self.exceeded) / math.sqrt(12)
        return math.hypot((self.exceeded - self.maximum) / math.sqrt(3), contradicted)

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
            self.held = max(self.held, rate)
            self.within = sorted([*self.within, rate])
            return
        self.exceeded = rate if self.exceeded is None else min(self.exceeded, rate)
        self.within = [each for each in self.within if each < rate]

    def run(
        self,
        probe: Callable[[float], bool | None],
        confirm: Callable[[float], bool | None],
        may_go_on: Callable[[], bool],
        stop_reason: str,
    ) -> None:
        """Search, and measure the maximum in full.

        Args:
            probe: Measures a rate briefly; returns whether it is within the SLO, None if there was no time to
                find out.
            confirm: Measures a rate in full.
            may_go_on: Returns whether there is time for another probe.
            stop_reason: Why the search ends if there is not, unless ``stopped`` has another reason.
        """
        confirmed: set[float] = set()
        for failures in range(MAX_CONFIRMATIONS):
            # Where short measurements were wrong once, only full ones count.
            measure = confirm if failures else probe
            while (rate := self.next_rate()) is not None:
                within = measure(rate) if may_go_on() else None
                if within is None:
                    self.stopped = self.stopped or stop_reason
                    break
                self.add(rate, within=within)
                confirmed |= {rate} if within and failures else set()
            found = self.maximum
            if found is None or found in confirmed:
                return
            within = confirm(found)
            if within is None:
                self.stopped = self.stopped or stop_reason
            if within is not False:
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
    """Return whether a value is a number; True is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def _least_requests(slo: Slo) -> int:
    return max(MIN_REQUESTS, required_requests(slo) if slo.attainment < 1 else MIN_REQUESTS_FOR_ALL)


def probe_requests(rate: float, slo: Slo, tolerance: float) -> int:
    """Return how many requests a load at a rate (requests per second) needs."""
    return max(_least_requests(slo), math.ceil(rate * required_seconds(slo, tolerance)))


def probe_rounds(requests: int, slo: Slo) -> int:
    """Return how many rounds of so many requests decide about a rate."""
    return min(MAX_PROBE_ROUNDS, math.ceil(POOLED_TIMES * _least_requests(slo) / requests))


def allowed_misses(requests: int, slo: Slo) -> int:
    """Return how many of these requests may miss the SLO."""
    return math.floor(requests * (1 - slo.attainment) + 1e-9)


def steady_requests(rounds: Sequence[Round], rate: float, requests: int) -> int:
    """Return how many requests give a load a steady state whose rounds were too short for one.

    Args:
        rounds: Its rounds.
        rate: Its requests per second.
        requests: Requests that each round had.
    """
    loads = [round_.served for round_ in rounds if round_.served is not None]
    took_s = [latency_s for served in loads for latency_s in served.end_to_end_latency_s]
    # The mean over those that are in flight at a time, of which more are long.
    mean_s = math.fsum(each**2 for each in took_s) / max(math.fsum(took_s), 1e-9)
    return max(2 * requests, math.ceil(rate * STEADY_TIMES * mean_s))


def is_within(rounds: Sequence[Round], slo: Slo | None) -> bool | None:
    """Return whether a load was within the SLO, which the requests of all rounds together decide.

    A load that the server cannot keep up with in half of the rounds is not within any SLO. ``None`` if that
    is not known: without a valid round, or if half of them have no steady state.
    """
    valid = [round_ for round_ in rounds if is_valid(round_)]
    if any(has_flag(each, *CUT_SHORT) for each in valid) or is_mostly(SATURATED, valid):
        return False
    if not valid or is_mostly(SHORT_LOAD, valid):
        return None
    return slo is None or (attainment(*valid) or 0.0) >= slo.attainment


def is_decided(rounds: Sequence[Round], slo: Slo, needed: int) -> bool:
    """Return whether these rounds of a rate, of equal length, decide whether it is within the SLO.

    ``needed`` valid rounds decide in any case.
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


def check_loads(given: int | None, slo: Slo, tolerance: float, budget_s: float, timeout_s: float) -> None:
    """Check that loads can show whether a rate is within the SLO.

    Args:
        given: Number of requests that the test asks for.
        slo: The limits.
        tolerance: Relative tolerance of the search.
        budget_s: Seconds that the search may take.
        timeout_s: Longest wait for a rank (seconds).

    Raises:
        PlanError: The number is too small for the attainment, or not even one load of the length that the
            tolerance needs fits into the time limits.
    """
    least, needed_s = required_requests(slo), required_seconds(slo, tolerance)
    if given is not None:
        if given < least:
            raise PlanError(
                f"max_load: num_requests is {given}, needs {least} or more, because "
                f"{slo.attainment * 100:g} % of fewer requests is all of them; or lower the attainment"
            )
        return
    limits = [f"budget={budget_s:g}"] if needed_s > budget_s else []
    if needed_s > TIMEOUT_SHARE * timeout_s:
        limits.append(f"nine tenths of --energy-timeout={timeout_s:g}")
    if limits:
        raise PlanError(
            f"max_load: a load that shows a rate above capacity by tolerance={tolerance:g} takes "
            f"{needed_s:.0f} s with {slo}, more than {' and '.join(limits)}; raise what is too short, or the "
            "tolerance"
        )


def arrivals_uncertainty(
    rate: float,
    rounds: Sequence[Round],
    lower: Mapping[float, Sequence[Round]],
    slo: Slo,
    tolerance: float,
    exceeding: Sequence[Round] = (),
) -> float | None:
    """Return how far a maximum load may be from that of other arrivals (standard uncertainty, requests/s).

    Each round has other arrivals, and with them another maximum. That of a single round is where its
    latencies reach the limit: they are known at the rate of the maximum, and how fast they rise is known from
    a lower rate with the same arrivals. The largest difference of two rounds is the uncertainty, more than
    their standard deviation, since rounds without one of the rare bursts that decide are all too high. Nor
    does a load show that its rate is above capacity by less than the tolerance, or by less than saturation
    needs if its queue breaks no limit. ``benchmarks/plugin/serving/max_load_run.py`` shows the coverage.

    Args:
        rate: The maximum.
        rounds: Its rounds.
        lower: The rounds of other rates that were within the SLO.
        slo: The limits.
        tolerance: Relative tolerance of the search.
        exceeding: The rounds of the rate that exceeded the SLO, if it has any.

    Returns:
        ``None`` with fewer than two rounds.
    """
    at_maximum = _ratios(rounds, slo)
    if len(at_maximum) < 2:
        return None
    rates = {each: found for each in lower if each < rate and (found := _ratios(lower[each], slo))}
    rise = SMALLEST_RISE
    if rates:
        below = max((each for each in rates if each * FARTHER <= rate), default=min(rates))
        same = min(len(at_maximum), len(rates[below]))
        risen = fmean(at_maximum[:same]) - fmean(rates[below][:same])
        rise = max(rise, risen / math.log(rate / below))
    scatter = (max(at_maximum) - min(at_maximum)) / rise
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
    return worst_latency_ratio(rounds, msgspec.structs.replace(slo, ttft_s=None, e2e_s=None)) > 1


def _ratios(rounds: Iterable[Round], slo: Slo) -> list[float]:
    """Return for each round the logarithm of the ratio that ``worst_latency_ratio`` gives."""
    complete = (each for each in rounds if is_valid(each) and each.served is not None)
    return [math.log(max(worst_latency_ratio([each], slo), SMALLEST_RATIO)) for each in complete]
