# SPDX-License-Identifier: Apache-2.0
"""Loads on servers of known capacity, computed by hand: queues of a few slots, and servers that slow down."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pytest_llenergy.backends.tasks import ServeParams
from pytest_llenergy.record.timeline import RequestTimeline

S = 1_000_000_000

#: Time of a request that has the server for itself (seconds), and the part before its first token.
SERVICE_S, FIRST_S = 1.0, 0.25


def arrivals_s(slots: int, load: float, number: int, seed: int) -> Sequence[float]:
    """Return Poisson arrivals at ``load`` times the capacity of ``slots``."""
    rate = load * slots / SERVICE_S
    return ServeParams.parse({"request_rate": rate, "num_requests": number, "seed": seed}).offsets_s()


def queued(slots: int, sent_s: Sequence[float], services_s: Sequence[float] = ()) -> list[RequestTimeline]:
    """Return the requests to a server that serves ``slots`` at once and lets the others wait in order."""
    free_s = [0.0] * slots
    requests = []
    for number, at_s in enumerate(sent_s):
        service_s = services_s[number] if services_s else SERVICE_S
        start_s = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + service_s)
        requests.append(_request(at_s, start_s + FIRST_S * service_s, start_s + service_s))
    return requests


def shedding(slots: int, waiting: int, sent_s: Sequence[float]) -> tuple[list[RequestTimeline], list[int]]:
    """Return the requests that a server like ``queued`` serves, and the places of those that it refuses,
    because so many wait.
    """
    begins_s: list[float] = []
    places: list[int] = []
    free_s = [0.0] * slots
    for place, at_s in enumerate(sent_s):
        if sum(begin_s > at_s for begin_s in begins_s) < waiting:
            begins_s.append(max(at_s, heapq.heappop(free_s)))
            heapq.heappush(free_s, begins_s[-1] + SERVICE_S)
            places.append(place)
    refused = [place for place in range(len(sent_s)) if place not in set(places)]
    return queued(slots, [sent_s[place] for place in places]), refused


def shared(slots: int, sent_s: Sequence[float]) -> list[RequestTimeline]:
    """Return the requests to a server that takes all at once; beyond ``slots``, each becomes slower."""
    left = [SERVICE_S] * len(sent_s)
    first_s, done_s = [0.0] * len(sent_s), [0.0] * len(sent_s)
    now_s, arrived, active = 0.0, 0, set[int]()
    while arrived < len(sent_s) or active:
        speed = min(1.0, slots / len(active)) if active else 1.0
        due = [left[each] - (SERVICE_S - FIRST_S if not first_s[each] else 0.0) for each in active]
        next_s = now_s + min(due, default=float("inf")) / speed
        arrives_s = sent_s[arrived] if arrived < len(sent_s) else float("inf")
        until_s = min(next_s, arrives_s)
        for each in active:
            left[each] -= (until_s - now_s) * speed
        now_s = until_s
        if arrives_s <= next_s:
            active.add(arrived)
            arrived += 1
        for each in list(active):
            if not first_s[each] and left[each] <= SERVICE_S - FIRST_S + 1e-9:
                first_s[each] = now_s
            elif left[each] <= 1e-9:
                done_s[each] = now_s
                active.remove(each)
    return [_request(*times_s) for times_s in zip(sent_s, first_s, done_s, strict=True)]


def _request(sent_s: float, first_s: float, done_s: float) -> RequestTimeline:
    # An origin that no server's time is before.
    start_ns, first_ns, done_ns = (round((10 + time_s) * S) for time_s in (sent_s, first_s, done_s))
    return RequestTimeline(
        input_tokens=1,
        output_tokens=2,
        start_ns=start_ns,
        first_token_ns=first_ns,
        last_token_ns=done_ns,
        token_ns=(first_ns, done_ns),
    )
