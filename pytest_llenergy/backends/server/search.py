# SPDX-License-Identifier: Apache-2.0
"""Loads of a search for the maximum: send no more once their result is certain."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pytest_llenergy.backends.server.client import Stream
from pytest_llenergy.backends.tasks import Probe
from pytest_llenergy.backends.timeouts import END_WAIT_S
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.served import ENDED_EARLY, OUT_OF_TIME


@dataclass
class MissCounter:
    """Counts the requests of a load that have missed the SLO while it runs; ``allowed`` may.

    It never overcounts: a first token does not arrive before the first byte, the end of a stream may come
    some time after its last token, and what the end of the load (``last_ns``) cuts off has missed nothing.
    """

    slo: Slo
    allowed: int
    last_ns: int
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
        if now_ns >= self.last_ns:
            return self.missed > self.allowed
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
