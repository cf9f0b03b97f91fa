# SPDX-License-Identifier: Apache-2.0
"""Search for the highest request rate within an SLO.

The search halves the ratio of a bracket until its ends differ by no more than half of the tolerance: the
scatter of latencies, which moves the bracket, has the other half. Both ends of the result were measured: the
lower one is within the SLO, the upper one is not. The ends of the given range are measured only if every rate
between them has the same result. How a rate is measured is described in ``load_probe``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pytest_llenergy.errors import PlanError

#: Most times that a maximum of short measurements is measured in full. Each time that it then fails, the
#: search goes on below, and further each time.
MAX_CONFIRMATIONS = 3

#: Smallest and largest tolerance of a search.
MIN_TOLERANCE, MAX_TOLERANCE = 0.001, 1.0


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
        doubted: Rate below the maximum that was not within the SLO when it was measured last.
        stopped: Why the search ended early.
    """

    low: float
    high: float
    tolerance: float
    within: list[float] = field(default_factory=list)
    exceeded: float | None = None
    held: float = 0.0
    doubted: float | None = None
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
    def uncertainty(self) -> float | None:
        """Standard uncertainty of the maximum (requests per second); None unless both bounds are known.

        The maximum is anywhere from the rate that holds, its value, to the one that exceeds the SLO: the
        width over the root of 3. If a higher rate once held, so that measurements contradict each other, it
        is anywhere between these two as well: the width over the root of 12. Both are rectangular
        distributions (GUM, JCGM 100:2008, 4.3.7).
        """
        if self.maximum is None or self.exceeded is None:
            return None
        lowest = self.exceeded if self.doubted is None else self.doubted
        contradicted = max(0.0, self.held - lowest) / math.sqrt(12)
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
            self.within.append(rate)
            self.within.sort()
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
    return isinstance(value, (int, float)) and not isinstance(value, bool)
