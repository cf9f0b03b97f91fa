# SPDX-License-Identifier: Apache-2.0
"""Energy, uncertainty and flags of a window, from the trace of a meter.

The formula for an edge depends on what lies outside it: a quiet gap, load, or no tick at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

from pytest_llenergy.energy.edges import energy_at, is_short_window, mean_powers, short_window_energy
from pytest_llenergy.energy.joint_solution import SAME_NS, window_energy
from pytest_llenergy.energy.quiet_gaps import Quiet, resolution_variance, share_fluctuation
from pytest_llenergy.energy.trace import JUMP, Mark, Series
from pytest_llenergy.energy.uncertainty import (
    Variances,
    WindowEnergy,
)
from pytest_llenergy.record.quantity import RESOLVABLE

#: Time after work in which power still settles, on the slowest recorded board (seconds).
SETTLING_S = 0.2

#: Ticks of integrated power on either side of a window from which a change at its edge is computed.
EDGE_TICKS = 2

#: Longest time for which a thread runs between a reading and the work next to it (seconds). A longer distance
#: is that of a thread that waits for a CPU.
WAY_S = 5e-5


def energy_between(
    series: Series,
    start_ns: int,
    end_ns: int,
    before: Quiet | None = None,
    after: Quiet | None = None,
    marks: Sequence[Mark] = (),
) -> WindowEnergy:
    """Return the energy of one domain between two moments, beside quiet gaps or not.

    Power may have changed at other ``marks``, such as the edges of other windows.
    """
    reason = series.reason_between(start_ns, end_ns)
    if reason is not None:
        return WindowEnergy(None, reason=reason)
    watch, smear_ns = series.domain.watch, series.smear_ns
    if watch is None:
        energy = _energy_between(series, start_ns, end_ns, before, after, marks)
    else:
        ways = (True, False) if watch.averages is None else (False,)
        energy, *others = [
            _energy_between(series.taken_as(averages=each), start_ns, end_ns, before, after, marks)
            for each in ways
        ]
        energy = _covering(energy, *others) if others else energy
    first_ns = (before.first.earliest_ns if before else start_ns) - smear_ns
    last_ns = (after.last.latest_ns if after else end_ns) + smear_ns
    return energy.widen(Variances(outside=series.stale_j(first_ns, last_ns) ** 2))


def _energy_between(
    series: Series,
    start_ns: int,
    end_ns: int,
    before: Quiet | None,
    after: Quiet | None,
    marks: Sequence[Mark],
) -> WindowEnergy:
    """Return the energy without what readings that stood still may have missed."""
    if before and after and not series.smear_ns:
        before, after = share_fluctuation(before, after)
    alone = before is None and after is None and not series.smear_ns
    energy = (_solve_window(series, start_ns, end_ns, marks) if alone else None) or _energy_between_edges(
        series, start_ns, end_ns, before, after
    )
    if energy.energy_j is None:
        return energy
    if before and after:
        # Power that differs between the gaps shows that it does not step at the marks: equally in all rounds.
        step_w = abs(energy.energy_j * 1e9 / (end_ns - start_ns) - after.watts)
        unsettled_w = abs(after.watts - before.watts) + after.fluctuation_w
        tail_j = min(step_w * series.domain.tail_s, unsettled_w * SETTLING_S)
        energy = energy.widen(Variances(shape=tail_j**2))
    sampling = Variances(coverage=_sampling_variance(series, start_ns, end_ns))
    energy = energy.widen(sampling)
    if series.domain.coverage >= 1:
        return energy
    unsampled = coverage_variance(series, start_ns, end_ns, before, after)
    if unsampled is None:
        reason = (
            f"not resolvable: {(end_ns - start_ns) / 1e6:.3g} ms window, and a sensor that sees "
            f"{series.domain.coverage:.0%} of each tick of a board whose power limit is not known"
        )
        return WindowEnergy(None, reason=reason)
    return energy.widen(Variances(coverage=unsampled))


def _energy_between_edges(
    series: Series, start_ns: int, end_ns: int, before: Quiet | None, after: Quiet | None
) -> WindowEnergy:
    """Return the difference of the energies at two edges, each beside a quiet gap, or else under load."""
    long = end_ns - start_ns >= series.smear_ns
    start = energy_at(series, start_ns, before, starts=True, long=long)
    end = energy_at(series, end_ns, after, starts=False, long=long)
    if start is None or end is None:
        side = "before" if start is None else "after"
        reason = f"{series.meter}: {series.domain.name} did not tick {side} the window"
        if series.smear_ns:
            reason = (
                f"not resolvable: {(end_ns - start_ns) / 1e6:.3g} ms window, power averaged over "
                f"{series.smear_s * 1e3:.0f} ms and not steady {side} the window"
            )
        return WindowEnergy(None, reason=reason)
    # If all ticks are equally late, the error depends only on the powers at the edges.
    known = start.watts is not None and end.watts is not None
    shifted_j = ((end.watts or 0.0) - (start.watts or 0.0)) * series.shift_s if known else 0.0
    common = Variances(resolution=resolution_variance(series), outside=shifted_j**2 / 12)
    return WindowEnergy(end.energy_j - start.energy_j, start.variances + end.variances + common)


def _covering(energy: WindowEnergy, other: WindowEnergy) -> WindowEnergy:
    """Return an energy whose two standard uncertainties reach to another one, which may be right instead."""
    if energy.energy_j is None or other.energy_j is None:
        return energy if energy.energy_j is None else other
    apart = Variances(shape=(energy.energy_j - other.energy_j) ** 2 / 4)
    return energy.widen(apart)


def _solve_window(series: Series, start_ns: int, end_ns: int, marks: Sequence[Mark]) -> WindowEnergy | None:
    """Return the energy of a window without quiet gaps, ``None`` if it has edges that can be taken alone."""
    ticks = series.domain.max_age_s is None
    energy = window_energy(series, start_ns, end_ns, marks) if ticks else None
    if energy is not None or not is_short_window(series, start_ns, end_ns):
        return energy
    before, after = series.tick_before(start_ns), series.tick_after(end_ns)
    if ticks and before is not None and after is not None:
        around = series.ticks_spanning(start_ns, end_ns, 2)
        first, last = (
            bisect_left(marks, each.time_ns, key=attrgetter("time_ns")) for each in (around[0], around[-1])
        )
        shared = marks[first:last]
        if any(min(abs(each.time_ns - start_ns), abs(each.time_ns - end_ns)) > SAME_NS for each in shared):
            # Other windows share its ticks, or those beside it: it has none to all of what its own show.
            all_j = after.energy_j - before.energy_j
            return WindowEnergy(all_j / 2, Variances(shape=all_j**2 / 12))
    return short_window_energy(series, start_ns, end_ns)


def energy_between_readings(series: Series, start_ns: int, end_ns: int) -> WindowEnergy:
    """Return the energy of work in the thread that read a resting counter right before and after it.

    On a busy machine a reading may come long after the work, while the thread waits for a CPU and the counter
    rests. Only what the thread runs on its way between reading and work is taken off.
    """
    # For the CPU time of this process, the moment of a reading is that at which it was made.
    age_ns = round((series.domain.max_age_s or 0.0) * 1e9)
    before, after = series.tick_before(start_ns), series.tick_after(end_ns - age_ns)
    if before is None or after is None or series.reason_between(start_ns, end_ns) is not None:
        return energy_between(series, start_ns, end_ns)
    away_ns = (start_ns - before.latest_ns, after.earliest_ns + age_ns - end_ns)
    way_s = sum(min(WAY_S, each / 1e9) for each in away_ns)
    between_j, work_s = after.energy_j - before.energy_j, (end_ns - start_ns) / 1e9
    way_j = between_j * way_s / (work_s + way_s)
    variances = Variances(edges=way_j**2 / 3, resolution=resolution_variance(series))
    return WindowEnergy(between_j - way_j, variances)


def _sampling_variance(series: Series, start_ns: int, end_ns: int) -> float:
    """Return the variance (J²) from power changes between the readings that were integrated.

    Where each refresh is observed, a change ΔP of power is assigned to a moment within the time g in which it
    was detected, with a variance of (g ΔP)²/12 each. Where each reading is the power of its moment, the
    trapezoidal rule has the same error for a step between two readings that are h apart. If power goes up and
    down faster than that, the readings are a sample, and the energy of h scatters by h σ. The trace holds the
    means of neighbouring readings. In terms of their differences d the variances are h² Σd²/6 and 2 h² Σd²;
    h² Σd²/√3 is the geometric mean.
    """
    if not series.domain.integrated:
        return 0.0
    ticks = series.ticks_spanning(start_ns, end_ns, EDGE_TICKS)
    steps = pairwise(b.watts_since(a) for a, b in pairwise(ticks))
    changes = [(b - a, tick, after) for (a, b), (tick, after) in zip(steps, pairwise(ticks[1:]), strict=True)]
    if series.domain.max_age_s is None:
        return sum((change_w * tick.gap_s) ** 2 for change_w, tick, _ in changes) / 12
    spread = sum((change_w * (after.time_ns - tick.time_ns) / 1e9) ** 2 for change_w, tick, after in changes)
    return spread / math.sqrt(3)


def require_resolvable(energy: WindowEnergy, series: Series, start_ns: int, end_ns: int) -> WindowEnergy:
    """Replace an energy whose uncertainty is above ``RESOLVABLE`` by what its bounds tell, or by a reason.

    A counter that ticks around a window bounds it: it holds none to all of the energy between these ticks,
    and at most the highest power of the device in its time.
    """
    if energy.energy_j is None or energy.u_j is None or energy.u_j <= RESOLVABLE * energy.energy_j:
        return energy
    domain, duration_s = series.domain, (end_ns - start_ns) / 1e9
    if domain.rests:
        # Not the tick, but how little was used, or that no reading was made near an edge.
        found = f"{energy.energy_j:.1g} ± {energy.u_j:.1g} J"
        return WindowEnergy(None, reason=f"not resolvable: {duration_s * 1e3:.3g} ms window, {found}")
    before, after = series.tick_before(start_ns), series.tick_after(end_ns)
    stall_s = series.latest_stall_s(start_ns, end_ns)
    if domain.highest_w and domain.coverage >= 1 and not series.smear_s and not stall_s and before and after:
        all_j = min(after.energy_j - before.energy_j, JUMP * domain.highest_w * duration_s)
        if energy.u_j <= all_j / math.sqrt(12):
            return energy
        return WindowEnergy(all_j / 2, Variances(shape=all_j**2 / 12))
    tick_ms = (series.period_s or 0.0) * 1e3
    reason = f"not resolvable: {duration_s * 1e3:.3g} ms window, {tick_ms:.3g} ms tick"
    if domain.coverage < 1:
        known = "sees" if domain.coverage_known else "may see only"
        reason += f" of which the sensor {known} {domain.coverage:.0%}"
    if stall_s:
        reason += f", and the counter of {domain.name} stood still for {stall_s * 1e3:.0f} ms"
    return WindowEnergy(None, reason=reason)


def coverage_variance(
    series: Series, start_ns: int, end_ns: int, before: Quiet | None, after: Quiet | None
) -> float | None:
    """Return the variance (J²) from what a part-time sensor did not sample, or ``None`` if nothing bounds it.

    The sensor samples a share f of each tick of length T and uses the sample for the whole tick. A step of
    power ΔP at a random moment of a tick then causes an error that is uniform over (1-f) T ΔP, whatever part
    of the tick is sampled: the variance is ((1-f) T ΔP)²/12 for each edge. A load of length D < T is sampled
    or missed: its variance is at most (ΔP D)² (1/f - 1).

    A change of power from tick to tick inside the window is such a step if power changes slowly, with
    (1-f)²/12; if power changes fast, it is the scatter of a sample, with (1-f)/2. The trace does not show
    which; (1-f)/5 lies between the two, by the geometric mean of the factors. Where n - 1 of n ticks were
    left unobserved, the differences are of means over n ticks: for power that scatters, their sum of squares
    is n² times smaller than from tick to tick. Slow changes then count as such scatter.
    """
    period_s, f = series.period_s, series.domain.coverage
    if period_s is None:
        return None
    missed_s = (1 - f) * period_s
    inside = mean_powers(series, start_ns, end_ns)
    wide_ns = round(3 * period_s * 1e9)
    lefts = [before.watts] if before else mean_powers(series, start_ns - wide_ns, start_ns)
    rights = [after.watts] if after else mean_powers(series, end_ns, end_ns + wide_ns)
    outside = lefts + rights
    if len(inside) < 2:
        if series.domain.highest_w is None:
            return None
        # The largest possible step: up to the power limit, or down to zero.
        step_w = max(series.domain.highest_w - min(outside, default=0.0), *outside, 0.0)
        duration_s = (end_ns - start_ns) / 1e9
        return step_w**2 * min(missed_s**2 / 6, duration_s**2 * (1 / f - 1))
    edges = sum((inside[0] - watts) ** 2 for watts in lefts[-1:])
    edges += sum((inside[-1] - watts) ** 2 for watts in rights[:1])
    spans = pairwise(
        (b.time_ns - a.time_ns) / 1e9 for a, b in pairwise(series.ticks_between(start_ns, end_ns))
    )
    each_of = [max(1, round((a_s + b_s) / 2 / period_s)) for a_s, b_s in spans]
    changes = sum(n**2 * (b - a) ** 2 for n, (a, b) in zip(each_of, pairwise(inside), strict=True))
    return missed_s**2 * edges / 12 + (1 - f) * period_s**2 * changes / 5
