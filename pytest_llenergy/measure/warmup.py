# SPDX-License-Identifier: Apache-2.0
"""Warm up until duration and power are stable, then calibrate the iterations of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_llenergy import real_time
from pytest_llenergy.energy.joint_solution import SHORTEST_TICKS
from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Series, Trace
from pytest_llenergy.measure.host_meters import BlockPower, HostMeters, enter_all
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.remaining_time import Step, StepCallback, ignore_step
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.record.metrics import PHASE_ITERATIONS

#: Consecutive blocks that differ by no more than this are settled.
SETTLED = 0.05

#: Shortest block that is compared, in seconds and in ticks of the slowest counter.
MIN_BLOCK_S = 0.05
BLOCK_TICKS = 3.5

#: Smallest number of ticks in a block for its power to count.
MIN_TICKS = 3

#: Largest number of blocks.
MAX_BLOCKS = 10

#: Share of the budget after which the warm-up ends.
MAX_BUDGET_SHARE = 0.5

CRITERION = (
    f"duration and power of two blocks in a row within {SETTLED:.0%}, at most {MAX_BLOCKS} blocks or "
    f"{MAX_BUDGET_SHARE:.0%} of the budget"
)
GIVEN = "number of iterations given"

#: Ticks that a round should contain, so that the power inside it is observed.
ROUND_TICKS = 3

#: Shortest round (seconds), whatever the budget, and where a counter has a period of ``SLOW_TICK_S``. Shorter
#: ones scatter with every interruption.
MIN_ROUND_S, MIN_SLOW_ROUND_S, SLOW_TICK_S = 0.1, 0.2, 0.05

#: A phase shorter than this many ticks needs ``PHASE_ITERATIONS``.
SHORT_PHASE_TICKS = 2.0

#: Share of the target for the uncertainty of the meters; the rest is for the spread of the work itself.
METER_SHARE = 0.5


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    ``iteration_s``, ``power_w`` and ``phases_s``, the mean length of each phase, are those of its last block
    if known.
    """

    iterations: int
    settled: bool | None
    criterion: str
    iteration_s: float | None
    power_w: float | None
    phases_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Block:
    iterations: int
    duration_s: float
    power_w: float | None
    blur: float
    phases_s: tuple[float, ...] = ()

    @property
    def iteration_s(self) -> float:
        return self.duration_s / self.iterations

    def agrees_with(self, other: _Block) -> bool:
        """Return whether both blocks agree within the criterion; an unknown power does not count.

        ``blur`` is the relative uncertainty of a power from the times of its ticks.
        """
        settled = abs(self.iteration_s - other.iteration_s) <= SETTLED * max(
            self.iteration_s, other.iteration_s
        )
        if self.power_w is None or other.power_w is None:
            return settled
        allowed = SETTLED + self.blur + other.blur
        return settled and abs(self.power_w - other.power_w) <= allowed * max(self.power_w, other.power_w)


def warm_up(
    workload: Workload,
    given: int | None,
    budget_s: float,
    hosts: Sequence[HostMeters],
    on_step: StepCallback = ignore_step,
    block_iterations: int = 1,
) -> WarmUp:
    """Run ``given`` iterations, or run until the work has settled if ``given`` is ``None``.

    Args:
        workload: The work.
        given: Number of iterations; None warms up until the work has settled.
        budget_s: Time that measuring may take (seconds).
        hosts: The meters.
        on_step: Called before each block.
        block_iterations: Iterations of each block, which divide ``given``.
    """
    __tracebackhide__ = True
    if given is not None:
        blocks = []
        count = given // block_iterations
        for number in range(1, count + 1):
            on_step(Step("warm-up", number, count))
            blocks.append(_block(workload, block_iterations, hosts))
        return _result(given, None, GIVEN, blocks[-1] if blocks else None)
    periods_s = [domain.period_s for host in hosts for domain in host.domains()]
    least_s = max([MIN_BLOCK_S, *(BLOCK_TICKS * period_s for period_s in periods_s)])
    on_step(Step("warm-up", 1))
    block, total, spent_s = _block(workload, 1, hosts), 1, 0.0
    for number in range(2, MAX_BLOCKS + 1):
        spent_s += block.duration_s
        iterations = block.iterations
        if block.duration_s < least_s:
            iterations = math.ceil(iterations * min(10.0, 1.2 * least_s / block.duration_s))
        if spent_s + iterations * block.iteration_s > MAX_BUDGET_SHARE * budget_s:
            break
        on_step(Step("warm-up", number))
        following = _block(workload, iterations, hosts)
        total += iterations
        if iterations == block.iterations and following.agrees_with(block):
            return _result(total, True, CRITERION, following)
        block = following
    return _result(total, False, CRITERION, block)


def _result(total: int, settled: bool | None, criterion: str, last: _Block | None) -> WarmUp:
    if last is None:
        return WarmUp(total, settled, criterion, None, None)
    return WarmUp(total, settled, criterion, last.iteration_s, last.power_w, last.phases_s)


def _block(workload: Workload, iterations: int, hosts: Sequence[HostMeters]) -> _Block:
    __tracebackhide__ = True
    workload.prepare_round()
    with enter_all(host.at_work() for host in hosts):
        workload.work(iterations)
    timeline = workload.timeline()
    phases_s = tuple(
        fmean(end - start for start, end in spans) / 1e9 for spans in phase_spans(timeline).values()
    )
    powers = [host.block_power(timeline.start_ns, timeline.end_ns) for host in hosts]
    known = [power for power in powers if power is not None]
    if not hosts or len(known) < len(powers):
        return _Block(iterations, timeline.duration_s, None, 0.0, phases_s)
    power_w, blur = sum(each.watts for each in known), max(each.blur for each in known)
    return _Block(iterations, timeline.duration_s, power_w, blur, phases_s)


def block_power(trace: Trace, start_ns: int, end_ns: int) -> BlockPower | None:
    """Return the power of a block of work, ``None`` without counters or if one ticked too rarely in it.

    Args:
        trace: One series for each domain.
        start_ns: Start of the block (monotonic nanoseconds).
        end_ns: End of the block (monotonic nanoseconds).
    """
    power_w, blur = 0.0, 0.0
    for series in trace:
        ticks = series.ticks_between(start_ns, end_ns)
        if len(ticks) < MIN_TICKS:
            return None
        first, last = ticks[0], ticks[-1]
        power_w += last.watts_since(first)
        blur = max(blur, (first.gap_s + last.gap_s) / ((last.time_ns - first.time_ns) / 1e9))
    return BlockPower(power_w, blur) if trace else None


def calibrate_iterations(
    warmup: WarmUp, rounds: int, gap_s: float, target: float, budget_s: float, hosts: Sequence[HostMeters]
) -> int:
    """Return the iterations of each round, as many as the target needs and the budget allows.

    Rounds last at least 100 ms, 200 ms with a slow counter, and have at least one iteration. If a phase is
    shorter than two ticks, all rounds together have 20 iterations. Measures a quiet gap. Returns 1 without a
    warm-up, since the duration of an iteration is then unknown.

    Args:
        warmup: Result of the warm-up.
        rounds: Smallest number of rounds.
        gap_s: Length of each quiet gap (seconds).
        target: Relative standard uncertainty to reach.
        budget_s: Time that measuring may take (seconds).
        hosts: The meters.
    """
    if not warmup.iteration_s:
        return 1
    start_ns = real_time.monotonic_ns()
    with enter_all(host.reading_closely() for host in hosts):
        real_time.sleep(gap_s)
    end_ns = real_time.monotonic_ns()
    needed = [host.required_round_s(start_ns, end_ns, warmup.power_w, rounds, target) for host in hosts]
    needed_s = max(needed, default=0.0)
    allowed_s = max(0.0, budget_s / rounds - 2 * gap_s)
    ticking_s = [domain.period_s for host in hosts for domain in host.domains() if domain.ticks]
    slowest_s = max(ticking_s, default=0.0)
    if any(SHORTEST_TICKS * slowest_s <= each < SHORT_PHASE_TICKS * slowest_s for each in warmup.phases_s):
        needed_s = max(needed_s, math.ceil(PHASE_ITERATIONS / rounds) * warmup.iteration_s)
    round_s = max(min(needed_s, allowed_s), MIN_SLOW_ROUND_S if slowest_s >= SLOW_TICK_S else MIN_ROUND_S)
    return max(1, math.ceil(round_s / warmup.iteration_s - 1e-6))


def required_round_s(
    series: Series, start_ns: int, end_ns: int, busy_w: float | None, rounds: int, target: float
) -> float:
    """Return how long a round must be for the meters to meet their share of the target (seconds).

    The uncertainty of a round does not depend on its length. It comes from the times of two ticks at idle
    power and, for a part-time sensor, from two steps between idle and busy power (see
    ``window_arithmetic.coverage_variance``).

    Args:
        series: Trace of the domain.
        start_ns: Start of a quiet gap (monotonic nanoseconds).
        end_ns: End of the gap (monotonic nanoseconds).
        busy_w: Power during the work (W); None if unknown.
        rounds: Smallest number of rounds.
        target: Relative standard uncertainty to reach.
    """
    period_s = series.period_s or 0.0
    least_s = ROUND_TICKS * period_s if series.domain.max_age_s is None else period_s
    quiet = quiet_power(series, start_ns, end_ns)
    if quiet is None or not busy_w:
        return least_s
    edges = 4 * (quiet.watts * max(quiet.first.gap_s, quiet.last.gap_s)) ** 2 / 12
    resolution = series.domain.resolution_j**2 / 6
    missed_s = (1 - series.domain.coverage) * period_s
    coverage = 2 * (missed_s * max(0.0, busy_w - quiet.watts)) ** 2 / 12
    bound_j = math.sqrt(edges + resolution + coverage)
    return max(least_s, bound_j / (busy_w * target * METER_SHARE * math.sqrt(rounds)))
