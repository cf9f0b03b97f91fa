# SPDX-License-Identifier: Apache-2.0
"""Share the energy of a round among its requests.

The power of each moment is shared among the requests that are active then: equally, or by their tokens. Power
of moments without a request is shared among all of them in the same way. With C(t) the integral of power over
the total weight of active requests, a request of weight g from a to b has g (C(b) - C(a)), so that all of
them add up to the energy of the round.

A counter shows power only from tick to tick, and requests begin and end between ticks. Within a tick, power
is taken to follow the load: a regression of the energies of ticks on the number of active requests, and of
those that wait for their first token, tells how. What it leaves of a tick is spread evenly over the tick. The
standard uncertainty of a request has three causes: power within ticks of which parts are shared differently,
which is as uncertain as the regression leaves ticks unexplained; the moments of ticks and requests; and the
energy of the round.
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

#: How well the regression is known before any tick is seen, as a share of the highest power.
PRIOR = 1.0

#: Power that the regression leaves, averaged over a tick: the usual share of the highest power, which counts
#: as much as so many ticks, and the least.
USUAL, USUAL_TICKS, LEAST = 0.05, 1, 0.01

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
    powers_w, variance = _fit(ticks, cells, series)
    clock_s2 = series.shift_s**2 / 12 + (u_ns / 1e9) ** 2
    energies_j, variances = _integrate(ticks, cells, powers_w, variance, spans, clock_s2)
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
        lengths_s: Length of each.
        shares: Share of its energy that an active request of weight one gets.
        idle: The same, of cells in the round in which no request is active.
        load: What power may follow: nothing, any request, active requests, those that wait for a token.
        ticks: Index of the first cell of each tick, and one more.
        begins: Index of the first cell of each request; ``ends`` is one after its last.
    """

    lengths_s: Any
    shares: Any
    idle: Any
    load: Any
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
    load = np.column_stack(
        [np.ones(len(active)), active > 0, active / most, np.sqrt(active / most), waiting > 0, waiting / most]
    )
    found = (np.searchsorted(edges_s, each) for each in (ticks_s, begins_s, ends_s))
    return _Cells(np.diff(edges_s), shares, idle, load, *found)


def _fit(ticks: Sequence[Tick], cells: _Cells, series: Series) -> tuple[Any, Any]:
    """Return the power of each cell (W), and how far it may be off in one second: a variance (W² s)."""
    import numpy as np

    lengths_s, starts = cells.lengths_s, cells.ticks[:-1]
    widths_s = np.add.reduceat(lengths_s, starts)
    ticks_w = np.diff([tick.energy_j for tick in ticks]) / widths_s
    scale_w = max(float(ticks_w.max()), 1e-9)
    design = np.add.reduceat(lengths_s[:, None] * cells.load, starts) / widths_s[:, None]
    # Long ticks tell more; the prior keeps what no tick tells near zero.
    rows = design * np.sqrt(widths_s)[:, None]
    spread = USUAL**2 * float(np.median(widths_s)) / PRIOR**2
    seen = rows.T @ rows + spread * np.eye(rows.shape[1])
    found = np.linalg.solve(seen, rows.T @ (ticks_w * np.sqrt(widths_s)))
    left_w = ticks_w - design @ found
    owners = np.repeat(np.arange(len(starts)), np.diff(cells.ticks))
    tick_s = float(np.median(widths_s))
    free = max(0.0, len(ticks_w) - rows.shape[1])
    total = float((left_w**2 * widths_s).sum()) + USUAL_TICKS * (USUAL * scale_w) ** 2 * tick_s
    variance = max(total / (free + USUAL_TICKS), (LEAST * scale_w) ** 2 * tick_s)
    return cells.load @ found + left_w[owners], variance / series.domain.coverage


def _integrate(
    ticks: Sequence[Tick],
    cells: _Cells,
    powers_w: Any,
    variance: float,
    spans: Sequence[RequestSpan],
    clock_s2: float,
) -> tuple[Any, Any]:
    """Return the energy of each request and its variance (J, J²), but for that of the whole round.

    ``clock_s2`` is the variance of all moments together (s²).
    """
    import numpy as np

    weights = np.array([span.weight for span in spans])
    lengths_s, edges, first, last = cells.lengths_s, cells.ticks, cells.begins, cells.ends

    def curves(shares: Any) -> Any:
        """Return the integrals of energy, shares and squared shares up to each edge of a cell."""
        columns = lengths_s[:, None] * np.column_stack([shares * powers_w, shares, shares**2])
        return np.vstack([np.zeros(3), np.cumsum(columns, axis=0)])

    widths_s = np.add.reduceat(lengths_s, edges[:-1])

    def unknown(sums: Any, begins: Any, ends: Any, tick: Any) -> Any:
        """Return how unevenly the cells of a part of a tick are shared (s); their sum is known."""
        return sums[ends, 2] - sums[begins, 2] - (sums[ends, 1] - sums[begins, 1]) ** 2 / widths_s[tick]

    idle = curves(cells.idle)
    everywhere = unknown(idle, edges[:-1], edges[1:], slice(None)).sum()
    sums = curves(cells.shares)
    whole = np.concatenate([[0.0], np.cumsum(unknown(sums, edges[:-1], edges[1:], slice(None)))])
    # The ticks in which each request begins and ends.
    left = np.searchsorted(edges, first, "right") - 1
    right = np.maximum(np.searchsorted(edges, last, "left") - 1, left)
    alone = left == right
    uneven = unknown(sums, first, np.where(alone, last, edges[left + 1]), left)
    uneven += np.where(alone, 0.0, unknown(sums, edges[right], last, right))
    uneven += np.where(alone, 0.0, whole[right] - whole[np.minimum(left + 1, right)])
    # A tick may have been seen late, and each edge of a request moves with the clock. A rectangular gap has a
    # variance of 1/12, of which an edge within a tick moves 2/3 on average: 1/18. Requests that begin with
    # others have more; ``benchmarks/plugin/serving/request_energy_run.py`` decides.
    gaps_s = np.array([tick.gap_s for tick in ticks])
    at_edges = (powers_w * cells.shares)[np.stack([first, last - 1])] ** 2
    moved = at_edges * (clock_s2 + np.stack([gaps_s[left], gaps_s[right + 1]]) ** 2 / 13)
    variances = variance * (uneven + everywhere) + moved.sum(axis=0)
    return weights * (sums[last, 0] - sums[first, 0] + idle[-1, 0]), weights**2 * variances
