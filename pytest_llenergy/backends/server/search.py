# SPDX-License-Identifier: Apache-2.0
"""Loads of a search for the maximum: end them once their result is certain, and wait for an idle server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from pytest_llenergy.backends.server.answers import explain_status
from pytest_llenergy.backends.server.client import Client, Stream
from pytest_llenergy.backends.tasks import Probe
from pytest_llenergy.backends.timeouts import END_WAIT_S, RETRY_S, SETTLE_S
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, OUT_OF_TIME

#: A server is idle if a request takes at most so many times as long as the fastest one did, and some seconds,
#: or if it takes no less than this share of the one before it.
IDLE_TIMES, IDLE_S, STEADY_SHARE = 1.5, 0.05, 0.8


@dataclass
class MissCounter:
    """Counts the requests of a load that have missed the SLO while it runs; ``allowed`` may.

    It never overcounts: a first token does not arrive before the first byte, and the end of a stream may come
    some time after its last token.
    """

    slo: Slo
    allowed: int
    sent: int = 0
    missed: int = 0
    _undecided: list[Stream] = field(default_factory=list)

    def watch(self, stream: Stream) -> None:
        """Add a request that is being sent."""
        self.sent += 1
        self._undecided.append(stream)

    def is_over(self) -> bool:
        """Look whether more requests than may have missed the SLO by now."""
        now_ns = time.monotonic_ns()
        streams, self._undecided = self._undecided, []
        for stream in streams:
            if self._has_missed(stream, now_ns):
                self.missed += 1
            elif not stream.ended:
                self._undecided.append(stream)
        return self.missed > self.allowed

    def _has_missed(self, stream: Stream, now_ns: int) -> bool:
        if stream.ended and stream.failed:
            return True
        first_ns = stream.reads[0][0] if stream.reads else now_ns
        if self.slo.ttft_s is not None and first_ns - stream.sent_ns > self.slo.ttft_s * 1e9:
            return True
        if self.slo.e2e_s is None:
            return False
        end_ns = stream.reads[-1][0] if stream.ended and stream.reads else now_ns
        return end_ns - stream.sent_ns > (self.slo.e2e_s + END_WAIT_S) * 1e9


def end_flag(probe: Probe, asked: int, counter: MissCounter) -> Flag:
    """Return why a load ended before all of its requests were sent and answered."""
    sent = f"the load ended with {counter.sent} of {asked} requests sent"
    rest = "its energy and duration are those of what was sent, and its latencies are left out"
    if counter.missed > counter.allowed:
        missed = f"{counter.missed} missed the SLO, and {probe.allowed} of {probe.requests} may"
        return Flag(name=ENDED_EARLY, severity="warning", detail=f"{sent}: {missed}; {rest}")
    return Flag(name=OUT_OF_TIME, severity="warning", detail=f"{sent}, because its time was up; {rest}")


@dataclass
class IdleCheck:
    """Finds out whether a server still works on requests whose streams were closed.

    A request that was sent after them is done after them, or takes longer because of them.

    Attributes:
        is_settled: Whether no load ended early since the server was last idle.
    """

    client: Client
    check_alive: Callable[[], None]
    is_settled: bool = True
    _body: bytes = b""
    _path: str = ""
    _fastest_s: float = inf

    def use(self, body: bytes, path: str) -> None:
        """Check with this request from now on."""
        if body != self._body:
            self._fastest_s = inf
        self._body, self._path = body, path

    async def settle(self, end_ns: int) -> bool:
        """Send one request after the other until the server is idle; return whether it is by ``end_ns``.

        Raises ``BackendError`` if the server has died, or refuses each of them.
        """
        before_s = inf
        refused_ns = time.monotonic_ns() + round(SETTLE_S * 1e9)
        while (begin_ns := time.monotonic_ns()) < end_ns:
            left_s = (end_ns - begin_ns) / 1e9
            stream = await self.client.stream(self._body, self._path, left_s)
            took_s = (time.monotonic_ns() - begin_ns) / 1e9
            if not stream.failed:
                self._fastest_s = min(self._fastest_s, took_s)
                if took_s <= IDLE_TIMES * self._fastest_s + IDLE_S or took_s >= STEADY_SHARE * before_s:
                    self.is_settled = True
                    return True
                before_s = took_s
                continue
            if took_s >= left_s:
                break
            if stream.broke:
                self.check_alive()
            if time.monotonic_ns() > refused_ns:
                why = stream.broke or explain_status(stream)
                raise BackendError(f"server: refused single requests for {SETTLE_S:g} s ({why})")
            await asyncio.sleep(RETRY_S)
        return False
