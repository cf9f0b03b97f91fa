# SPDX-License-Identifier: Apache-2.0
"""Phases of a served load: ramp-up, steady state and ramp-down, and whether it had a steady state at all.

A load that the server cannot keep up with is never steady: its queue grows until the last request is sent, so
that joules and latencies depend on when the load ends. It is ``saturated``, and so is one of which the server
refuses too much. A load that lasts only a few service times shows neither, and is a ``short-load``.

A conversation counts as a whole, from its first turn to its last token: the slower the server, the later it
gets follow-ups, so that requests hardly show that it fell behind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

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

#: Shortest steady state, in times that a request or conversation takes. In a closed loop as many are in
#: flight from the start, so that fewer are enough.
OPEN_SERVICE_TIMES, CLOSED_SERVICE_TIMES = 3.0, 2.0

#: Times in seconds: when a request was due, its first token and its last.
_Times = tuple[float, float, float]


@dataclass(frozen=True)
class _Load:
    """Conversations in the order in which they were due; a request without follow-ups is one of one turn.

    Attributes:
        asked_s: When each was to begin, failed ones included.
        due_s: When each that was answered was to begin.
        waits_s: Mean time to the first token of its turns.
        done_s: When its last token came.
        turns: Mean number of turns.
    """

    asked_s: Sequence[float]
    due_s: Sequence[float]
    waits_s: Sequence[float]
    done_s: Sequence[float]
    turns: float

    @property
    def name(self) -> str:
        return "requests" if self.turns == 1 else "conversations"

    @property
    def latencies_s(self) -> list[float]:
        """Time to the last token of each conversation."""
        return [done - due for done, due in zip(self.done_s, self.due_s, strict=True)]

    @property
    def asked_per_s(self) -> float:
        return (len(self.asked_s) - 1) / max(self.asked_s[-1] - self.asked_s[0], 1e-9)

    @property
    def achieved_per_s(self) -> float:
        """Rate at which they were done. Between first and last completion, their own time cancels.

        Conversations on a slow server end together, long after the last has begun, because each waits for
        the turns of the others. Their rate while others begin counts if it is lower.
        """
        done = sorted(self.done_s)
        rate = (len(done) - 1) / max(done[-1] - done[0], 1e-9)
        begun = len(self.asked_s) - 1 - bisect_right(self.asked_s, done[0])
        if self.turns == 1 or begun < MIN_REQUESTS // 2:
            return rate
        return min(rate, self.asked_per_s * (bisect_right(done, self.due_s[-1]) - 1) / begun)

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
    talks: Sequence[int] = (),
    *,
    failed: Mapping[int, int | None] | None = None,
    is_capped: bool = False,
) -> tuple[list[Span], list[Flag]]:
    """Return the phases of a load; without a steady state none, and a flag that gives the reason.

    Args:
        requests: The requests in the order of their send times.
        concurrency: Requests in flight of a closed loop; None for an open loop.
        start_ns: Start of the load (monotonic nanoseconds).
        end_ns: End of the load.
        due_ns: When each request of an open loop was due, None for follow-ups; empty if all were on time.
        talks: The number of the conversation of each request; empty if there are no follow-ups.
        failed: When each failed conversation was due, by its number; None after its first turn.
        is_capped: Whether the client limited the requests in flight of an open loop.
    """
    failed = failed or {}
    failed_ns = [due for due in failed.values() if due is not None]
    load = _read_load(requests, due_ns, talks, failed_ns)
    if load is None:
        return [], [Flag(name=SHORT_LOAD, severity="note", detail="the times of the requests are unknown")]
    number = len({*(talks or range(len(requests))), *failed})
    if len(failed) > (1 - KEEPS_UP) * number * (1 + 1e-9):
        paced = concurrency is None and load.asked_s[-1] > load.asked_s[0]
        rate = f", asked for {load.asked_per_s:.3g} {load.name}/s" if paced else ""
        lower = "the rate" if concurrency is None else "concurrency"
        detail = f"{len(failed)} of {number} {load.name} failed{rate}; lower {lower}, or see {FAILED}"
        return [], [Flag(name=SATURATED, severity="warning", detail=detail)]
    steady = steady_span(requests, concurrency, talks)
    short = _describe_shortness(load, steady, concurrency)
    lag = _describe_lag(load) if concurrency is None else None
    if lag is not None and _is_overloaded(load):
        detail = f"{lag}; lower the rate{' or raise concurrency' if is_capped else ''}"
        return [], [Flag(name=SATURATED, severity="warning", detail=detail)]
    if short is not None:
        detail = f"{short}; or the rate is too high: {lag}" if lag is not None else short
        severity: Severity = "warning" if lag is not None else "note"
        return [], [Flag(name=SHORT_LOAD, severity=severity, detail=detail)]
    return phase_spans(requests, concurrency, start_ns, end_ns, talks), []


def _read_load(
    requests: Sequence[RequestTimeline],
    due_ns: Sequence[int | None],
    talks: Sequence[int],
    failed_ns: Sequence[int],
) -> _Load | None:
    """Return the times of conversations; None if one is unknown. Follow-ups are due when they are sent."""
    due = due_ns or [None] * len(requests)
    times = [
        (start / 1e9, each.first_token_ns / 1e9, each.last_token_ns / 1e9)
        for each, at_ns in zip(requests, due, strict=True)
        if (start := each.start_ns if at_ns is None else at_ns) is not None
        and each.first_token_ns is not None
        and each.last_token_ns is not None
    ]
    if not times or len(times) < len(requests):
        return None
    wholes = sorted(
        (rows[0][0], fmean(first - due for due, first, _ in rows), rows[-1][2])
        for rows in _by_talk(times, talks)
    )
    due_s, waits_s, done_s = zip(*wholes, strict=True)
    return _Load(
        asked_s=sorted([*due_s, *(each / 1e9 for each in failed_ns)]),
        due_s=due_s,
        waits_s=waits_s,
        done_s=done_s,
        turns=len(times) / len(wholes),
    )


def _by_talk(times: Sequence[_Times], talks: Sequence[int]) -> list[list[_Times]]:
    """Return the times of each conversation, in their order."""
    found: dict[int, list[_Times]] = {}
    for talk, row in zip(talks or range(len(times)), times, strict=True):
        found.setdefault(talk, []).append(row)
    return list(found.values())


def _describe_lag(load: _Load) -> str | None:
    """Return by how much the server fell behind the rate asked for; None if it kept up."""
    if len(load.due_s) < MIN_REQUESTS or load.due_s[-1] <= load.due_s[0]:
        return None
    achieved = load.achieved_per_s
    if achieved >= KEEPS_UP * load.asked_per_s:
        return None
    if load.turns > 1:
        # That one compares conversations that began and ended in the same time.
        achieved = len(load.done_s) / max(max(load.done_s) - load.asked_s[0], 1e-9)
    return f"achieved {achieved:.3g} of {load.asked_per_s:.3g} {load.name}/s"


def _is_overloaded(load: _Load) -> bool:
    """Return whether a load that the server fell behind has a growing queue: its latencies rise.

    They are times to the first token, as in front of a server with a fixed number of slots, or to the last,
    if a server takes all at once and becomes slower. Rates alone would be wrong for short loads, of which the
    last requests may meet a queue by chance, and for unlike answers: until the longest have ended, the last
    are done late, however fast the server is.
    """
    rises = (
        kendall_z(values_s) > RISE_Z and turns * load.rise_of(values_s) > 1 / KEEPS_UP - 1
        for values_s, turns in ((load.waits_s, load.turns), (load.latencies_s, 1.0))
    )
    return any(rises)


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
        return f"{len(load.due_s)} {load.name} never fill {concurrency} places; send more"
    lasts_s = (steady[1] - steady[0]) / 1e9 if steady is not None else 0.0
    # The mean over those that are in flight at a time, of which more are long.
    took_s = sum(each**2 for each in load.latencies_s) / max(sum(load.latencies_s), 1e-9)
    times = OPEN_SERVICE_TIMES if concurrency is None else CLOSED_SERVICE_TIMES
    if steady is not None and lasts_s >= times * took_s:
        return None
    return (
        f"the steady state lasts {lasts_s:.2g} s, and a {load.name[:-1]} {took_s:.2g} s; send more "
        f"{load.name}, so that it lasts {times:g} times as long"
    )


def steady_span(
    requests: Sequence[RequestTimeline], concurrency: int | None, talks: Sequence[int] = ()
) -> tuple[int, int] | None:
    """Return start and end of the steady state (monotonic nanoseconds); None if there is no such time.

    It ends when the last conversation begins. In a closed loop it begins when ``concurrency`` of them have
    produced their first token, as in ML.ENERGY's benchmark; in an open one when the first is done: with
    Poisson arrivals and equal service times the number in service is stationary then (M/D/infinity).
    """
    sent: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for talk, each in zip(talks or range(len(requests)), requests, strict=True):
        if each.start_ns is None or each.first_token_ns is None or each.last_token_ns is None:
            return None
        sent.setdefault(talk, each.start_ns)
        first.setdefault(talk, each.first_token_ns)
        last[talk] = each.last_token_ns
    if len(sent) < (concurrency or 1):
        return None
    start_ns = min(last.values()) if concurrency is None else sorted(first.values())[concurrency - 1]
    return (start_ns, max(sent.values())) if start_ns < max(sent.values()) else None


def phase_spans(
    requests: Sequence[RequestTimeline],
    concurrency: int | None,
    start_ns: int,
    end_ns: int,
    talks: Sequence[int] = (),
) -> list[Span]:
    """Return ramp-up, steady state and ramp-down of a load, whose arguments are those of ``load_phases``.

    A token counts in the span in which it arrived. Without a timestamp for every token no counts are given.
    """
    steady = steady_span(requests, concurrency, talks)
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
