# SPDX-License-Identifier: Apache-2.0
"""Phases of a served load: ramp-up, steady state and ramp-down, and whether it had a steady state at all.

A load that the server cannot keep up with is never steady: its queue grows until the last request is sent, so
that joules and latencies depend on when the load ends. It is ``saturated``. A load that lasts only a few
service times shows neither, and is a ``short-load``. Neither has phases.

Of conversations, only the first turns are sent on a schedule. Follow-ups are sent when the answers before
them have ended: the slower the server, the later they are sent, so that they never show that it fell behind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

from pytest_llenergy.model.record import Flag, Severity
from pytest_llenergy.model.timeline import RequestTimeline, Span

#: Flags of loads without a steady state.
SATURATED, SHORT_LOAD = "saturated", "short-load"

#: A server keeps up if it achieves this share of the rate that was asked for. Below the second share, longer
#: latencies are enough to call it saturated, however they scatter.
KEEPS_UP, FAR_BEHIND = 0.9, 0.8

#: Fewest requests in which a rise can be seen.
MIN_REQUESTS = 9

#: A rise of the wait for the first token counts from so many standard errors of Kendall's statistic on, and
#: if even the shortest wait at the end exceeds the usual one at the start by this share of the time of a
#: request: the queue of a server that keeps up empties now and then.
#: ``benchmarks/plugin/serving/saturation_run.py`` shows how seldom these limits are wrong.
RISE_Z, RISE_SHARE = 3.0, 0.25

#: The same for the number of requests in flight, in standard deviations of a Poisson count.
IN_FLIGHT_Z = 2.5

#: Shortest steady state, in times that a request takes. In a closed loop as many requests are in flight from
#: the start, so that fewer are enough.
OPEN_SERVICE_TIMES, CLOSED_SERVICE_TIMES = 3.0, 2.0


@dataclass(frozen=True)
class _Load:
    """When each request was due, had its first token, and was done (s), in the order of sending."""

    due_s: Sequence[float]
    first_s: Sequence[float]
    done_s: Sequence[float]

    @property
    def third(self) -> int:
        return len(self.due_s) // 3

    @property
    def waits_s(self) -> list[float]:
        """Time to the first token of each request."""
        return [first - due for first, due in zip(self.first_s, self.due_s, strict=True)]

    @property
    def latencies_s(self) -> list[float]:
        """Time to the last token of each request."""
        return [done - due for done, due in zip(self.done_s, self.due_s, strict=True)]

    def rise_of(self, values_s: Sequence[float]) -> float:
        """Rise of latencies in seconds for each second: the slope of Tukey's resistant line (Exploratory Data
        Analysis, 1977, ch. 5). It is the rate asked for over that achieved, minus one.
        """
        over_s = median(self.due_s[-self.third :]) - median(self.due_s[: self.third])
        rise_s = median(values_s[-self.third :]) - median(values_s[: self.third])
        return rise_s / over_s if over_s > 0 else 0.0

    @property
    def asked_per_s(self) -> float:
        return (len(self.due_s) - 1) / (self.due_s[-1] - self.due_s[0])

    @property
    def achieved_per_s(self) -> float:
        """Rate at which requests were done. Between first and last completion, their own time cancels."""
        return (len(self.done_s) - 1) / max(max(self.done_s) - min(self.done_s), 1e-9)

    @property
    def in_flight(self) -> list[int]:
        """Earlier requests that were not yet done when each was due, from the first completion on."""
        done = sorted(self.done_s)
        return [number - bisect_right(done, due) for number, due in enumerate(self.due_s) if due >= done[0]]

    @property
    def most_in_flight(self) -> int:
        """Most requests at a time that were due and not yet done."""
        done = sorted(self.done_s)
        return max(number - bisect_right(done, due) for number, due in enumerate(self.due_s, 1))


def load_phases(
    requests: Sequence[RequestTimeline],
    concurrency: int | None,
    start_ns: int,
    end_ns: int,
    due_ns: Sequence[int | None] = (),
    *,
    is_capped: bool = False,
) -> tuple[list[Span], list[Flag]]:
    """Return the phases of a load; without a steady state none, and a flag that gives the reason.

    Args:
        requests: The requests in the order of their send times.
        concurrency: Requests in flight of a closed loop; None for an open loop.
        start_ns: Start of the load (monotonic nanoseconds).
        end_ns: End of the load (monotonic nanoseconds).
        due_ns: When each request of an open loop was due, None for follow-ups; empty if all were sent on
            time.
        is_capped: Whether the client limited the requests in flight of an open loop.
    """
    load = _stamps(requests, due_ns)
    if load is None:
        return [], [Flag(name=SHORT_LOAD, severity="note", detail="the times of the requests are unknown")]
    short = _describe_shortness(load, requests, concurrency)
    paced = _scheduled(requests, due_ns) if concurrency is None else None
    behind = None
    if paced is not None:
        name = "requests" if len(paced.due_s) == len(requests) else "first turns"
        behind = _describe_lag(paced, name, is_capped=is_capped)
    if paced is not None and behind is not None and _overloads(paced, is_short=short is not None):
        return [], [Flag(name=SATURATED, severity="warning", detail=f"{behind}; lower the rate")]
    if short is not None:
        detail = f"{short}; or the rate is too high: {behind}" if behind is not None else short
        severity: Severity = "warning" if behind is not None else "note"
        return [], [Flag(name=SHORT_LOAD, severity=severity, detail=detail)]
    return phase_spans(requests, concurrency, start_ns, end_ns), []


def _describe_lag(load: _Load, name: str, *, is_capped: bool) -> str | None:
    """Return by how much the server fell behind the rate of ``name`` asked for; None if it kept up."""
    if len(load.due_s) < MIN_REQUESTS or load.due_s[-1] <= load.due_s[0]:
        return None
    if load.achieved_per_s >= KEEPS_UP * load.asked_per_s:
        return None
    before_s, after_s = median(load.waits_s[: load.third]), median(load.waits_s[-load.third :])
    since, where = (
        (" from the time they were due", "waiting or in flight") if is_capped else ("", "in flight")
    )
    return (
        f"asked for {load.asked_per_s:.3g} {name}/s, achieved {load.achieved_per_s:.3g}; time to first "
        f"token{since} {before_s:.2g} s in the first third, {after_s:.2g} s in the last, and up to "
        f"{load.most_in_flight} {name} {where}"
    )


def _overloads(load: _Load, *, is_short: bool) -> bool:
    """Return whether a load that the server fell behind has a growing queue.

    Of requests that wait for their first token, as in front of a server with a fixed number of slots, or of
    requests in flight, if a server takes all at once and becomes slower. Rates alone would be wrong for short
    loads, of which the last requests may meet a queue by chance. guidellm looks at the slopes of the same two
    (github.com/vllm-project/guidellm, its over-saturation constraint).
    """
    if _waits_rise(load) or _in_flight_rises(load):
        return True
    far_behind = load.achieved_per_s < FAR_BEHIND * load.asked_per_s
    rise = max(load.rise_of(load.waits_s), load.rise_of(load.latencies_s))
    return far_behind and not is_short and rise > 1 / KEEPS_UP - 1


def _scheduled(requests: Sequence[RequestTimeline], due_ns: Sequence[int | None]) -> _Load | None:
    """Return the times of the requests that were sent on a schedule: all but follow-ups."""
    if not due_ns:
        return _stamps(requests, due_ns)
    pairs = [(each, due) for each, due in zip(requests, due_ns, strict=True) if due is not None]
    return _stamps([each for each, _ in pairs], [due for _, due in pairs])


def _stamps(requests: Sequence[RequestTimeline], due_ns: Sequence[int | None]) -> _Load | None:
    """Return the times of all requests; None if one is unknown. Follow-ups are due when they are sent."""
    sent = [each.start_ns for each in requests]
    if due_ns:
        sent = [start if due is None else due for start, due in zip(sent, due_ns, strict=True)]
    columns = sent, [each.first_token_ns for each in requests], [each.last_token_ns for each in requests]
    known = [[time_ns / 1e9 for time_ns in column if time_ns is not None] for column in columns]
    return _Load(*known) if requests and all(len(each) == len(requests) for each in known) else None


def _waits_rise(load: _Load) -> bool:
    """Return whether the time to the first token rises through the load."""
    waits_s, third = load.waits_s, load.third
    if load.rise_of(waits_s) <= 1 / KEEPS_UP - 1 or kendall_z(waits_s) <= RISE_Z:
        return False
    # One in ten is shorter, so that the wait in the queue hardly counts.
    took_s = sorted(load.latencies_s)[len(waits_s) // 10]
    return min(waits_s[-third:]) - median(waits_s[:third]) > RISE_SHARE * took_s


def _in_flight_rises(load: _Load) -> bool:
    """Return whether more and more requests are in flight.

    Of those that were sent after the first completion, the share by which their number grows with each is the
    share of the rate that is not achieved.
    """
    numbers = load.in_flight
    third = len(numbers) // 3
    if third < MIN_REQUESTS // 3:
        return False
    first, middle, last = (fmean(part) for part in (numbers[:third], numbers[third:-third], numbers[-third:]))
    share = (last - first) / (len(numbers) - third)
    return (
        first < middle < last
        and share > 1 - KEEPS_UP
        and last - first > IN_FLIGHT_Z * sqrt(max(last + first, 1.0))
    )


def kendall_z(values: Sequence[float]) -> float:
    """Return Kendall's rank statistic of a trend, in standard deviations: Mann, Econometrica 13 (1945)."""
    before: list[float] = []
    score = 0
    for number, value in enumerate(values):
        score += bisect_left(before, value) - (number - bisect_right(before, value))
        insort(before, value)
    n = len(values)
    return score / sqrt(n * (n - 1) * (2 * n + 5) / 18) if n > 1 else 0.0


def _describe_shortness(
    load: _Load, requests: Sequence[RequestTimeline], concurrency: int | None
) -> str | None:
    """Return why a load is too short for a steady state; None if it is not."""
    if concurrency is not None and concurrency > len(requests):
        return f"{len(requests)} requests never fill {concurrency} places; send more"
    steady = steady_span(requests, concurrency)
    lasts_s = (steady[1] - steady[0]) / 1e9 if steady is not None else 0.0
    took_s = median(load.latencies_s)
    times = OPEN_SERVICE_TIMES if concurrency is None else CLOSED_SERVICE_TIMES
    if steady is not None and lasts_s >= times * took_s:
        return None
    return (
        f"the steady state lasts {lasts_s:.2g} s, and a request {took_s:.2g} s; send more requests, so "
        f"that it lasts {times:g} times as long"
    )


def steady_span(requests: Sequence[RequestTimeline], concurrency: int | None) -> tuple[int, int] | None:
    """Return start and end of the steady state (monotonic nanoseconds); None if there is no such time.

    It ends when the last request is sent. In a closed loop it begins when ``concurrency`` requests have
    produced their first token, as in ML.ENERGY's benchmark (github.com/ml-energy/benchmark,
    mlenergy/llm/benchmark.py: from the first token of request B to that of request N - B, for N requests
    queued at a server of batch size B). An open loop has no such number; there it begins when the first
    request is done: with Poisson arrivals and equal service times the number in service is stationary from
    then on (M/D/infinity; Eick, Massey and Whitt, The physics of the Mt/G/infinity queue, 1993).
    """
    stamps = [(each.start_ns, each.first_token_ns, each.last_token_ns) for each in requests]
    sent = [start_ns for start_ns, _, _ in stamps if start_ns is not None]
    first = sorted(first_ns for _, first_ns, _ in stamps if first_ns is not None)
    done = [last_ns for _, _, last_ns in stamps if last_ns is not None]
    if not requests or not len(sent) == len(first) == len(done) == len(requests):
        return None
    if concurrency is not None and concurrency > len(first):
        return None
    start_ns = min(done) if concurrency is None else first[concurrency - 1]
    return (start_ns, max(sent)) if start_ns < max(sent) else None


def phase_spans(
    requests: Sequence[RequestTimeline], concurrency: int | None, start_ns: int, end_ns: int
) -> list[Span]:
    """Return ramp-up, steady state and ramp-down of a load that ran from ``start_ns`` to ``end_ns``.

    A token counts in the span in which it arrived. Without a timestamp for every token no counts are given.

    Args:
        requests: The requests in the order of their send times.
        concurrency: Requests in flight of a closed loop; None for an open loop.
        start_ns: Start of the load (monotonic nanoseconds).
        end_ns: End of the load (monotonic nanoseconds).
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
