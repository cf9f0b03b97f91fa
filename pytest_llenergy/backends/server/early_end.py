# SPDX-License-Identifier: Apache-2.0
"""End a load of a search as soon as its result is certain, and see that the server is idle before the next.

What can be seen before a stream ends never overcounts misses: a first token does not arrive before the first
byte, a request without an answer has waited at least until now, and one with an answer is late only if a
token was: servers may end a stream long after its last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from pytest_llenergy.backends.server.client import Client, Stream
from pytest_llenergy.backends.server.stream import error_text, has_tokens_after
from pytest_llenergy.backends.tasks import Probe
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, OUT_OF_TIME

#: Interval of the checks whether a request that has tokens already gets one after its limit (seconds).
RECHECK_S = 0.05

#: A server is idle if a request takes at most so many times as long as the fastest one did, and some seconds,
#: or if it takes no less than this share of the one before it.
IDLE_TIMES, IDLE_S, STEADY_SHARE = 1.5, 0.05, 0.8

#: Longest time for which a server may refuse these requests if no load before them ended early, and interval
#: of the next ones (seconds). After such a load its queue may be full for as long as it is busy.
REFUSED_S, RETRY_S = 5.0, 0.2

#: Longest wait for an idle server where no search limits it (seconds).
SETTLE_S = 60.0

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


@dataclass
class IdleCheck:
    """Finds out whether a server still works on requests whose streams were closed.

    A request that was sent after them is done after them, or takes longer because of them.

    Attributes:
        is_settled: Whether no load ended early since the server was last idle.
    """

    is_settled: bool = True
    _check: Callable[[], None] = lambda: None
    _client: Client | None = None
    _body: bytes = b""
    _path: str = ""
    _fastest_s: float = inf

    def use(self, body: bytes, client: Client, path: str, check: Callable[[], None]) -> None:
        """Check with this request from now on; ``check`` raises if the server has died."""
        if body != self._body:
            self._fastest_s = inf
        self._client, self._body, self._path, self._check = client, body, path, check

    async def settle(self, end_ns: int) -> bool:
        """Send one request after the other until the server is idle; return whether it is by ``end_ns``.

        Raises:
            BackendError: The server has died, or refuses each of them.
        """
        assert self._client is not None
        before_s = inf
        refused_s = REFUSED_S if self.is_settled else SETTLE_S
        refused_ns = time.monotonic_ns() + round(refused_s * 1e9)
        while True:
            begin_ns = time.monotonic_ns()
            sending = self._client.stream(self._body, self._path)
            try:
                stream = await asyncio.wait_for(sending, max(0.0, (end_ns - begin_ns) / 1e9))
            except asyncio.TimeoutError:
                return False
            if stream.failed:
                if stream.broke:
                    self._check()
                if time.monotonic_ns() > refused_ns:
                    why = stream.broke or f"{stream.status}: {error_text(stream.body())}"
                    raise BackendError(f"server: refused single requests for {refused_s:g} s ({why})")
                await asyncio.sleep(RETRY_S)
                continue
            took_s = (time.monotonic_ns() - begin_ns) / 1e9
            self._fastest_s = min(self._fastest_s, took_s)
            if took_s <= IDLE_TIMES * self._fastest_s + IDLE_S or took_s >= STEADY_SHARE * before_s:
                self.is_settled = True
                return True
            before_s = took_s
