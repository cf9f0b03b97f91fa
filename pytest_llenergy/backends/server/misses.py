# SPDX-License-Identifier: Apache-2.0
"""Count the requests of a load of a search that miss the SLO, and end it once its result is certain.

What can be seen before a stream ends never overcounts misses: a first token does not arrive before the first
byte, a request without an answer has waited at least until now, and one with an answer is late only if a
token was: servers may end a stream long after its last one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pytest_llenergy.backends.server.answers import has_tokens_after
from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.tasks import Probe
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, OUT_OF_TIME

#: Interval of the checks whether a request that has tokens already gets one after its limit (seconds).
RECHECK_S = 0.05

OF_WHAT_WAS_SENT = "its energy and duration are those of what was sent, and its latencies are left out"


@dataclass
class MissCounter:
    """Counts requests that have missed the SLO while the load runs.

    Attributes:
        slo: The limits.
        allowed: Requests that may miss it.
        over: Set as soon as more have.
        sent: Requests sent so far.
        was_cut: Whether the load ended before all of them were answered.
    """

    slo: Slo
    allowed: int
    over: asyncio.Event = field(default_factory=asyncio.Event)
    missed: set[int] = field(default_factory=set)
    sent: int = 0
    was_cut: bool = False
    _is_closed: bool = False
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def watch(self, stream: Stream) -> None:
        """Check a request that is being sent when its limits end."""
        self.sent += 1
        loop = asyncio.get_running_loop()
        if (limit_s := self.slo.ttft_s) is not None:
            self._timers.append(loop.call_later(limit_s, self._check_first, stream, limit_s))
        if (limit_s := self.slo.e2e_s) is not None:
            self._timers.append(loop.call_later(limit_s, self._check_end, stream, limit_s))

    def add(self, stream: Stream) -> None:
        """Count a request that has missed the SLO."""
        self.missed.add(id(stream))
        if len(self.missed) > self.allowed and not self._is_closed:
            self.over.set()

    def close(self) -> None:
        """Check nothing any more."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()

    def _check_first(self, stream: Stream, limit_s: float) -> None:
        if not stream.reads or stream.reads[0][0] - stream.sent_ns > limit_s * 1e9:
            self.add(stream)

    def _check_end(self, stream: Stream, limit_s: float) -> None:
        if self._is_closed:
            return
        if not stream.reads or has_tokens_after(stream, stream.sent_ns + round(limit_s * 1e9)):
            self.add(stream)
        elif not stream.ended:
            asyncio.get_running_loop().call_later(RECHECK_S, self._check_end, stream, limit_s)


def end_flag(probe: Probe, asked: int, counter: MissCounter) -> Flag:
    """Return why a load ended before all of its requests were sent and answered."""
    sent = f"the load ended with {counter.sent} of {asked} requests sent"
    if counter.over.is_set():
        detail = (
            f"{sent}: {len(counter.missed)} missed the SLO, and {probe.allowed} of {probe.requests} may; "
            f"{OF_WHAT_WAS_SENT}"
        )
        return Flag(name=ENDED_EARLY, severity="warning", detail=detail)
    detail = f"{sent}, because its time was up; {OF_WHAT_WAS_SENT}"
    return Flag(name=OUT_OF_TIME, severity="warning", detail=detail)
