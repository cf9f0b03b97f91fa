# SPDX-License-Identifier: Apache-2.0
"""Phases of a served load: ramp-up, steady state and ramp-down, and whether it had a steady state at all.

A load that the server cannot keep up with is never steady: its queue grows until the last request is sent, so
that energy and latencies depend on when the load ends. It is ``saturated``, and so is one of which the server
refuses too much. A load that lasts only a few service times shows neither, and is a ``short-load``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from pytest_llenergy.record.record import Flag, Severity
from pytest_llenergy.record.served import FAILED, SATURATED, SHORT_LOAD
from pytest_llenergy.record.timeline import RequestTimeline, Span

#: A server keeps up if it achieves this share of the rate that was asked for.
KEEPS_UP = 0.9

#: Fewest requests in which a rise can be seen.
MIN_REQUESTS = 9

#: A rise of latencies counts from so many standard errors of Kendall's statistic on.
#: ``benchmarks/plugin/serving/saturation_run.py`` shows how seldom these limits are wrong.
RISE_Z = 3.0

#: Shortest steady state, in times that a request takes. In a closed loop as many are in flight from the
#: start, so that fewer are enough.
OPEN_SERVICE_TIMES, CLOSED_SERVICE_TIMES = 3.0, 2.0


@dataclass(frozen=True)
class _Load:
    """Times of the requests that were answered, in the order in which they were due (seconds).

    ``asked_s`` is when each was due, failed ones included.
    """

    asked_s: Sequence[float]
    due_s: Sequence[float]
    first_s: Sequence[float]
    last_s: Sequence[float]

    def latencies_s(self, until_s: Sequence[float]) -> list[float]:
        """Return the time from when each request was due to its first or last token."""
        return [until - due for until, due in zip(until_s, self.due_s, strict=True)]

    @property
    def asked_per_s(self) -> float:
        return (len(self.asked_s) - 1) / max(self.asked_s[-1] - self.asked_s[0], 1e-9)

    @property
    def achieved_per_s(self) -> float:
        """Rate at which they were done. Between first and last completion, their own time cancels."""
        return (len(self.last_s) - 1) / max(max(self.last_s) - min(self.last_s), 1e-9)

    def rise_of(self, values_s: Sequence[float]) -> float:
        """Rise of latencies in seconds for each second: the slope of Tukey's resistant line (Exploratory Data
        Analysis, 1977, ch. 5). It is the rate asked for over that achieved, minus one.
        """
        third = len(values_s) // 3
        over_s = median(self.due_s[-third:]) - median(self.due_s[:third])
        rise_s = median(values_s[-third:]) - median(values_s[:third])
        return rise_s / over_s if over_s > 0 else 0.0


def load_phases(
    requests: Sequence[RequestTimeline],
    concurrency: int | None,
    start_ns: int,
    end_ns: int,
    due_ns: Sequence[int | None] = (),
    *,
    failed_ns: Sequence[int | None] = (),
    is_capped: bool = False,
) -> tuple[list[Span], list[Flag]]:
    """Return the phases of a load; without a steady state none, and a flag that gives the reason.

    The requests are in the order of their send times; ``concurrency`` is None for an open loop. ``due_ns``
    is when each request of an open loop was due, empty if all were on time, and ``failed_ns`` the same for
    those that failed. ``is_capped``: the client limited the requests in flight of an open loop.
    """
    load = _read_load(requests, due_ns, failed_ns)
    if load is None:
        return [], [Flag(name=SHORT_LOAD, severity="note", detail="the times of the requests are unknown")]
    number = len(requests) + len(failed_ns)
    if len(failed_ns) > (1 - KEEPS_UP) * number * (1 + 1e-9):
        paced = concurrency is None and load.asked_s[-1] > load.asked_s[0]
        rate = f", asked for {load.asked_per_s:.3g} requests/s" if paced else ""
        lower = "the rate" if concurrency is None else "concurrency"
        detail = f"{len(failed_ns)} of {number} requests failed{rate}; lower {lower}, or see {FAILED}"
        return [], [Flag(name=SATURATED, severity="warning", detail=detail)]
    short = _describe_shortness(load, steady_span(requests, concurrency), concurrency)
    lag = _describe_lag(load) if concurrency is None else None
    if lag is not None and _is_overloaded(load):
        detail = f"{lag}; lower the rate{' or raise concurrency' if is_capped else ''}"
        return [], [Flag(name=SATURATED, severity="warning", detail=detail)]
    if short is not None:
        detail = f"{short}; or the rate is too high: {lag}" if lag is not None else short
        severity: Severity = "warning" if lag is not None else "note"
        return [], [Flag(name=SHORT_LOAD, severity=severity, detail=detail)]
    return phase_spans(requests, concurrency, start_ns, end_ns), []


def _read_load(
    requests: Sequence[RequestTimeline], due_ns: Sequence[int | None], failed_ns: Sequence[int | None]
) -> _Load | None:
    """Return the times of the requests; None if one is unknown."""
    times = sorted(
        (start / 1e9, each.first_token_ns / 1e9, each.last_token_ns / 1e9)
        for each, at_ns in zip(requests, due_ns or [None] * len(requests), strict=True)
        if (start := each.start_ns if at_ns is None else at_ns) is not None
        and each.first_token_ns is not None
        and each.last_token_ns is not None
    )
    if not times or len(times) < len(requests):
        return None
    due_s, first_s, last_s = zip(*times, strict=True)
    return _Load(sorted([*due_s, *(each / 1e9 for each in failed_ns if each)]), due_s, first_s, last_s)


def _describe_lag(load: _Load) -> str | None:
    """Return by how much the server fell behind the rate asked for; None if it kept up."""
    if len(load.due_s) < MIN_REQUESTS or load.due_s[-1] <= load.due_s[0]:
        return None
    if load.achieved_per_s >= KEEPS_UP * load.asked_per_s:
        return None
    return f"achieved {load.achieved_per_s:.3g} of {load.asked_per_s:.3g} requests/s"


def _is_overloaded(load: _Load) -> bool:
    """Return whether a load that the server fell behind has a growing queue: its latencies rise.

    They are times to the first token, as in front of a server with a fixed number of slots, or to the last,
    if a server takes all at once and becomes slower. Rates alone would be wrong for short loads, of which the
    last requests may meet a queue by chance, and for unlike answers: until the longest have ended, the last
    are done late, however fast the server is.
    """
    latencies_s = map(load.latencies_s, (load.first_s, load.last_s))
    return any(kendall_z(each) > RISE_Z and load.rise_of(each) > 1 / KEEPS_UP - 1 for each in latencies_s)


def kendall_z(values: Sequence[float]) -> float:
    """Return Kendall's rank statistic of a trend, in standard deviations: Mann, Econometrica 13 (1945)."""
    before: list[float] = []
    score = 0
    for number, value in enumerate(values):
        score += bisect_left(before, value) - (number - bisect_right(before, value))
        insort(before, value)
    n = len(values)
    return score / sqrt(n * (n - 1) * (2 * n + 5) / 18) if n > 1 else 0.0


def _describe_shortness(load: _Load, steady: tuple[int, int] | None, concurrency: int | None) -> str | None:
    """Return why a load is too short for a steady state; None if it is not."""
    if concurrency is not None and concurrency > len(load.due_s):
        return f"{len(load.due_s)} requests never fill {concurrency} places; send more"
    lasts_s = (steady[1] - steady[0]) / 1e9 if steady is not None else 0.0
    # The mean over those that are in flight at a time, of which more are long.
    took_s = load.latencies_s(load.last_s)
    service_s = sum(each**2 for each in took_s) / max(sum(took_s), 1e-9)
    times = OPEN_SERVICE_TIMES if concurrency is None else CLOSED_SERVICE_TIMES
    if steady is not None and lasts_s >= times * service_s:
        return None
    return (
        f"the steady state lasts {lasts_s:.2g} s, and a request {service_s:.2g} s; send more requests, so "
        f"that it lasts {times:g} times as long"
    )


def steady_span(requests: Sequence[RequestTimeline], concurrency: int | None) -> tuple[int, int] | None:
    """Return start and end of the steady state (monotonic nanoseconds); None if there is no such time.

    It ends when the last request is sent. In a closed loop it begins when ``concurrency`` of them have
    produced their first token, as in ML.ENERGY's benchmark; in an open one when the first is done: with
    Poisson arrivals and equal service times the number in service is stationary then (M/D/infinity).
    """
    sent = [each.start_ns for each in requests if each.start_ns is not None]
    first = sorted(each.first_token_ns for each in requests if each.first_token_ns is not None)
    last = [each.last_token_ns for each in requests if each.last_token_ns is not None]
    if not len(requests) == len(sent) == len(first) == len(last) or len(sent) < (concurrency or 1):
        return None
    start_ns = min(last) if concurrency is None else first[concurrency - 1]
    return (start_ns, max(sent)) if start_ns < max(sent) else None


def phase_spans(
    requests: Sequence[RequestTimeline], concurrency: int | None, start_ns: int, end_ns: int
) -> list[Span]:
    """Return ramp-up, steady state and ramp-down of a load, whose arguments are those of ``load_phases``.

    A token counts in the span in which it arrived. Without a timestamp for every token no counts are given.
    """
    steady = steady_span(requests, concurrency)
    if steady is None:
        return []
    stamps = [stamp for request in requests for stamp in request.token_ns]
    all_stamped = all(len(request.token_ns) == request.output_tokens for request in requests)
    edges = ("ramp-up", start_ns, steady[0]), ("steady", *steady), ("ramp-down", steady[1], end_ns)
    return [
        Span(
            name=name,
            start_ns=start,
            end_ns=end,
            # A token on a boundary counts in the later span.
            output_tokens=sum(start <= stamp < end for stamp in stamps) if all_stamped else None,
        )
        for name, start, end in edges
    ]
