# SPDX-License-Identifier: Apache-2.0
"""Share the energy of a round among its requests.

The power of each moment is shared among the requests that are active then: equally, or by their tokens. Power
of moments without a request is shared among all of them in the same way. With C(t) the integral of power over
the total weight of active requests, a request of weight g from a to b has g (C(b) - C(a)), so that all of
them add up to the energy of the round.

A counter shows power only from tick to tick, and requests begin and end between ticks. Within a tick, power
is taken to follow the load: a regression of the energies of ticks on the number of active requests, and of
those that wait for their first token, tells how. What it leaves of a tick is spread evenly over the tick. The
standard uncertainty of a request has four causes: power that fluctuates within ticks of which
parts count differently, the coefficients of the regression, the moments of ticks, and the energy of the
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import msgspec

from pytest_llenergy.energy.trace import NEIGHBOURS, Series, Tick
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.round_statistics import percentile
from pytest_llenergy.record.served import RequestEnergies
from pytest_llenergy.record.timeline import Timeline

#: Standard deviations of the coefficients before the ticks are seen, as shares of the highest power: any
#: power, what active requests add, what waiting ones add, and what differs from a straight line at each
#: number of active requests.
ANY_POWER, PER_ACTIVE, PER_WAITING, OFF_LINE = 3.0, 1.0, 0.5, 0.3

#: Standard deviation of fluctuation averaged over a tick, as a share of the highest power: usual and least.
#: The usual one counts as much as ``USUAL_TICKS`` ticks.
USUAL, LEAST, USUAL_TICKS = 0.05, 0.01, 3

#: How often coefficients and fluctuation, each of which needs the other, are computed in turn.
PASSES = 4

#: Fluctuation of power grows with the power of the load: this part of its variance is there at no power.
AT_REST = 0.1


#: Requests shorter than this share of a tick cannot be told from others: up to a half lie beyond 2u.
SHORTEST_TICKS = 0.3


class RequestSpan(NamedTuple):
    """When a request was active (monotonic nanoseconds), and its weight among others."""

    start_ns: int
    first_token_ns: int
    end_ns: int
    weight: float


class RequestShares(msgspec.Struct, frozen=True):
    """Energy of each request in one domain with its standard uncertainty (J); ``reason`` if there is none."""

    energy_j: list[float] = []
    u_j: list[float] = []
    reason: str | None = None


def request_spans(timeline: Timeline, sharing: Sharing) -> tuple[RequestSpan, ...]:
    """Return the span of each request, in the order of sending; empty if the end of one is unknown.

    The weight by tokens is the number of tokens of the prompt and the output.
    """
    spans: list[RequestSpan] = []
    for rank in timeline.ranks:
        for iteration in () if rank.repeats_others else rank.iterations:
            for each in iteration.requests:
                if each.last_token_ns is None:
                    return ()
                start_ns = iteration.start_ns if each.start_ns is None else each.start_ns
                first_ns = start_ns if each.first_token_ns is None else each.first_token_ns
                tokens = max(1, each.input_tokens + each.output_tokens)
                weight = 1.0 if sharing == "equal" else float(tokens)
                spans.append(RequestSpan(start_ns, first_ns, each.last_token_ns, weight))
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def share_among_requests(
    series: Series, spans: Sequence[RequestSpan], start_ns: int, end_ns: int, whole: WindowEnergy, u_ns: float
) -> RequestShares:
    """Return the energy of each request of a round in one domain; they add up to that of the round.

    Args:
        series: Trace of the domain.
        spans: The requests.
        start_ns: Start of the round (monotonic nanoseconds).
        end_ns: End of the round.
        whole: Energy of the round.
        u_ns: Standard uncertainty of all moments on the clock of the trace.
    """
    if whole.energy_j is None or whole.u_j is None:
        return RequestShares(reason=whole.reason)
    if series.smear_ns:
        averaged = f"{series.domain.name} shows power averaged over {series.smear_s:.2g} s"
        return RequestShares(reason=f"{averaged}, which tells no request from others")
    tick_s = series.tick_period_s or 0.0
    if median(span.end_ns - span.start_ns for span in spans) < SHORTEST_TICKS * tick_s * 1e9:
        shorter = f"its requests are much shorter than a tick of {series.domain.name} ({tick_s:.2g} s)"
        return RequestShares(reason=f"{shorter}, which tells no request from others")
    ticks = series.without_common_delay(series.ticks_spanning(start_ns, end_ns, NEIGHBOURS))
    if not ticks or ticks[0].time_ns > start_ns or ticks[-1].time_ns < end_ns or whole.energy_j <= 0:
        return RequestShares(reason=f"{series.domain.name} has too little energy in the round to be shared")
    cells = _divide(ticks, spans, start_ns, end_ns)
    fit = _fit(ticks, cells, series)
    energies_j, variances = _integrate(cells, fit, spans, series.shift_s**2 / 12 + (u_ns / 1e9) ** 2)
    factor = whole.energy_j / float(energies_j.sum())
    energies_j = factor * energies_j
    variances = factor**2 * variances + (energies_j / whole.energy_j * whole.u_j) ** 2
    return RequestShares(energies_j.tolist(), (variances**0.5).tolist())


def sum_shares(domains: Sequence[RequestShares]) -> RequestShares:
    """Return the sum over domains. All follow the same requests, so that their uncertainties are added."""
    missing = next((each for each in domains if each.reason is not None), None)
    if missing is not None or not domains:
        return missing or RequestShares(reason="no meter was open")
    return RequestShares(
        [sum(each) for each in zip(*(domain.energy_j for domain in domains), strict=True)],
        [sum(each) for each in zip(*(domain.u_j for domain in domains), strict=True)],
    )


def request_energies(shares: RequestShares, sharing: Sharing, *, each: bool) -> RequestEnergies:
    """Return the energies of a round's requests for its record, one by one only if ``each``."""
    if shares.reason is not None:
        return RequestEnergies(shared=sharing, reason=shares.reason)
    order = sorted(range(len(shares.energy_j)), key=shares.energy_j.__getitem__)
    energies_j, u_j = ([values[index] for index in order] for values in (shares.energy_j, shares.u_j))
    quantiles: dict[str, Any] = {}
    for percent in (50, 90, 99):
        place = (len(order) - 1) * percent // 100
        quantiles[f"p{percent}_j"] = percentile(energies_j, percent)
        quantiles[f"p{percent}_u_j"] = max(u_j[place : place + 2])
    listed: dict[str, Any] = {"energy_j": shares.energy_j, "energy_u_j": shares.u_j} if each else {}
    return RequestEnergies(shared=sharing, **quantiles, **listed)


@dataclass(frozen=True)
class _Cells:
    """Stretches between all ticks and edges of requests, in time order, with numpy arrays of one row each.

    Attributes:
        edges_s: Edges of cells, one more than cells (seconds from the start of the round).
        lengths_s: Length of each.
        shares: Share of its energy that a request of weight one gets.
        idle: The same, of cells in the round in which no request is active.
        basis: Values of the regression's functions.
        ticks: Index of the edge of each tick.
        begins: Index of the edge at which each request begins; ``ends`` likewise.
    """

    edges_s: Any
    lengths_s: Any
    shares: Any
    idle: Any
    basis: Any
    ticks: Any
    begins: Any
    ends: Any


def _divide(ticks: Sequence[Tick], spans: Sequence[RequestSpan], start_ns: int, end_ns: int) -> _Cells:
    import numpy as np

    moments_s = (np.array([span[:3] for span in spans], dtype=float) - start_ns) / 1e9
    length_s = (end_ns - start_ns) / 1e9
    begins_s, firsts_s, ends_s = np.clip(moments_s, 0.0, length_s).T
    firsts_s = np.clip(firsts_s, begins_s, ends_s)
    weights = np.array([span.weight for span in spans])
    ticks_s = np.array([(tick.time_ns - start_ns) / 1e9 for tick in ticks])
    edges_s = np.unique(np.concatenate([ticks_s, begins_s, firsts_s, ends_s, [0.0, length_s]]))
    lefts_s = edges_s[:-1]

    def count(moments_s: Any, weights: Any) -> Any:
        """Return the total weight of the moments up to the start of each cell."""
        order = np.argsort(moments_s)
        totals = np.concatenate([[0.0], np.cumsum(weights[order])])
        return totals[np.searchsorted(moments_s[order], lefts_s, "right")]

    ones = np.ones(len(spans))
    active = count(begins_s, ones) - count(ends_s, ones)
    waiting = count(begins_s, ones) - count(firsts_s, ones)
    weight = count(begins_s, weights) - count(ends_s, weights)
    inside = (lefts_s >= 0) & (lefts_s < length_s)
    shares = np.where(inside & (active > 0), 1 / np.where(active > 0, weight, 1.0), 0.0)
    idle = np.where(inside & (active == 0), 1 / weights.sum(), 0.0)
    most = max(active.max(), 1.0)
    knots = np.unique([0.0, *2.0 ** np.arange(np.log2(most)), most])
    hats = [np.interp(active, knots, np.eye(len(knots))[index]) for index in range(len(knots))]
    within = [
        ANY_POWER * inside,
        PER_ACTIVE * active / most,
        PER_WAITING * waiting / most,
        *(OFF_LINE * hat for hat in hats),
    ]
    basis = np.column_stack([ANY_POWER * ~inside, *(each * inside for each in within)])
    found = (np.searchsorted(edges_s, each) for each in (ticks_s, begins_s, ends_s))
    return _Cells(edges_s, np.diff(edges_s), shares, idle, basis, *found)


@dataclass(frozen=True)
class _Fit:
    """What the ticks tell of power.

    Attributes:
        powers_w: Power of each cell.
        ticks_w: Power of each tick.
        fluctuation: Variance of the energy of each cell (J²) from what the regression leaves.
        moments: Variance of the energy that a tick may have taken from the next one (J²), for each tick.
        unseen: Variance of the energy of each tick from what a part-time sensor does not sample (J²).
        coefficients: Covariance of the coefficients (W²).
    """

    powers_w: Any
    ticks_w: Any
    fluctuation: Any
    moments: Any
    unseen: Any
    coefficients: Any


def _fit(ticks: Sequence[Tick], cells: _Cells, series: Series) -> _Fit:
    import numpy as np

    increments_j = np.diff([tick.energy_j for tick in ticks])
    widths_s = np.diff(cells.edges_s[cells.ticks])
    ticks_w = increments_j / widths_s
    scale_w = max(float(ticks_w.max()), 1e-9)
    # Ticks before the first cell's edge or after the last have no cells: ``ticks`` bound all of them.
    design = scale_w * np.add.reduceat(cells.lengths_s[:, None] * cells.basis, cells.ticks[:-1])
    gaps_s = np.array([tick.gap_s for tick in ticks])
    near_w = np.maximum(np.append(ticks_w[:1], ticks_w), np.append(ticks_w, ticks_w[-1:]))
    moments = ((near_w * gaps_s) ** 2 + series.domain.resolution_j**2) / 12
    noise = moments[:-1] + moments[1:]
    tick_s = float(np.median(widths_s))
    usual = (USUAL * scale_w) ** 2 * tick_s
    fluctuation, found = usual, np.zeros(design.shape[1])
    for _ in range(PASSES):
        shares = np.clip(cells.basis @ found, 0.0, 1.0) ** 2 if found.any() else 1.0
        spread_s = cells.lengths_s * (AT_REST + (1 - AT_REST) * shares)
        spreads_s = np.add.reduceat(spread_s, cells.ticks[:-1])
        weights = 1 / (fluctuation * spreads_s + noise)
        seen = design.T @ (weights[:, None] * design)
        covariance = np.linalg.inv(seen + np.eye(len(seen)))
        found = covariance @ (design.T @ (weights * increments_j))
        left_j = increments_j - design @ found
        free = max(0.0, len(increments_j) - float(np.trace(covariance @ seen)))
        excess = float(((left_j**2 - noise) / spreads_s).sum())
        fluctuation = (max(0.0, excess) + USUAL_TICKS * usual) / (free + USUAL_TICKS)
        fluctuation = max(fluctuation, (LEAST * scale_w) ** 2 * tick_s)
    left_w = np.repeat(left_j / spreads_s, np.diff(cells.ticks)) * spread_s / cells.lengths_s
    powers_w = scale_w * cells.basis @ found + left_w
    coverage = series.domain.coverage
    steps_w = np.diff(np.append(ticks_w[:1], ticks_w))
    unseen = (1 - coverage) * (fluctuation * spreads_s / coverage + (steps_w * widths_s) ** 2 / 5)
    return _Fit(powers_w, ticks_w, fluctuation * spread_s, moments, unseen, scale_w**2 * covariance)


def _integrate(cells: _Cells, fit: _Fit, spans: Sequence[RequestSpan], clock_s2: float) -> tuple[Any, Any]:
    """Return the energy of each request and its variance (J, J²), but for that of the whole round.

    ``clock_s2`` is the variance of all moments together (s²).
    """
    import numpy as np

    weights = np.array([span.weight for span in spans])
    edges, lengths_s = cells.ticks, cells.lengths_s
    totals = np.add.reduceat(fit.fluctuation, edges[:-1])
    owners = np.repeat(np.arange(len(totals)), np.diff(edges))
    # What the regression leaves of a tick is divided by these, so that an error of a coefficient is, too.
    parts = fit.fluctuation / totals[owners]
    by_tick = np.add.reduceat(lengths_s[:, None] * cells.basis, edges[:-1])
    deviations = lengths_s[:, None] * cells.basis - parts[:, None] * by_tick[owners]

    def curves(shares: Any) -> tuple[Any, Any, Any, Any]:
        """Return integrals up to each edge: of power, of shares, of their squares, and of the basis."""
        columns = np.column_stack(
            [
                shares * lengths_s * fit.powers_w,
                shares * parts,
                shares**2 * fit.fluctuation,
                shares[:, None] * deviations,
            ]
        )
        sums = np.vstack([np.zeros(columns.shape[1]), np.cumsum(columns, axis=0)])
        return sums[:, 0], sums[:, 1], sums[:, 2], sums[:, 3:]

    def fluctuation(first: Any, last: Any, tick: Any) -> Any:
        """Return the part of the variance from fluctuation in a part of a tick."""
        return squared[last] - squared[first] - (linear[last] - linear[first]) ** 2 * totals[tick]

    joules, linear, squared, by_basis = curves(cells.idle)
    means = np.diff(linear[edges])
    steps = np.diff(np.concatenate([[0.0], means, [0.0]]))
    idle_j, idle_basis = joules[-1], by_basis[-1]
    idle_variance = fluctuation(edges[:-1], edges[1:], slice(None)).sum()
    idle_variance += (fit.moments * steps**2).sum() + (fit.unseen * means**2).sum()

    joules, linear, squared, by_basis = curves(cells.shares)
    first, last = cells.begins, cells.ends
    # The ticks in which each request begins and ends.
    left = np.searchsorted(edges, first, "right") - 1
    right = np.maximum(np.searchsorted(edges, last, "left") - 1, left)
    alone = left == right
    first_end, last_start = np.where(alone, last, edges[left + 1]), np.where(alone, last, edges[right])
    means = np.diff(linear[edges])
    at_first = linear[first_end] - linear[first]
    at_last = linear[last] - linear[last_start]

    def between(values: Any) -> Any:
        """Return the sum over the ticks between those of the edges."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return np.where(right - left > 1, sums[right] - sums[np.minimum(left + 1, right)], 0.0)

    variances = (
        fluctuation(first, first_end, left)
        + between(fluctuation(edges[:-1], edges[1:], slice(None)))
        + fluctuation(last_start, last, right)
    )
    variances += (
        fit.unseen[left] * at_first**2 + between(fit.unseen * means**2) + fit.unseen[right] * at_last**2
    )
    # The mean share in each tick of a request is that of all moments; only at its edges it is less.
    steps = fit.moments[:-1] * np.diff(np.concatenate([[0.0], means])) ** 2
    inner = np.where(right - left > 1, between(steps) - steps[np.minimum(left + 1, right)], 0.0)
    second = np.where(right - left > 1, means[np.minimum(left + 1, right)], at_last)
    before_last = np.where(right - left > 1, means[np.maximum(right - 1, left)], at_first)
    variances += (
        fit.moments[left] * at_first**2 + fit.moments[right + 1] * np.where(alone, at_first, at_last) ** 2
    )
    variances += np.where(alone, 0.0, fit.moments[left + 1] * (at_first - second) ** 2)
    variances += inner + np.where(right - left > 1, fit.moments[right] * (before_last - at_last) ** 2, 0.0)
    basis = by_basis[last] - by_basis[first] + idle_basis
    variances += np.einsum("ni,ij,nj->n", basis, fit.coefficients, basis) + idle_variance
    most = len(cells.shares) - 1
    shift_w = fit.powers_w[np.maximum(last - 1, 0)] * cells.shares[np.maximum(last - 1, 0)]
    shift_w = shift_w - fit.powers_w[np.minimum(first, most)] * cells.shares[np.minimum(first, most)]
    variances += clock_s2 * shift_w**2
    return weights * (joules[last] - joules[first] + idle_j), weights**2 * variances
