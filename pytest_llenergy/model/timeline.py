# SPDX-License-Identifier: Apache-2.0
"""What a rank says about one round: monotonic timestamps and counts, no energy.

All times are nanoseconds of ``CLOCK_MONOTONIC``, which is one clock for every process of a host, so
the process that reads the meters can join them with its trace.
"""

from __future__ import annotations

import msgspec


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a batch.

    ``output_tokens`` counts what was produced, up to and including the end-of-sequence token; padding
    is not output. The two times are ``None`` when the engine does not say when tokens appeared.
    """

    input_tokens: int
    output_tokens: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on one rank. ``cpu_time_s`` is the CPU time of the rank's process within it."""

    rank: int
    start_ns: int
    end_ns: int
    cpu_time_s: float
    first_token_ns: int | None = None
    requests: tuple[RequestTimeline, ...] = ()


class RoundTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on all its ranks: the window runs from the first start to the last end."""

    ranks: tuple[RankTimeline, ...]

    @property
    def start_ns(self) -> int:
        """First start of any rank."""
        return min(rank.start_ns for rank in self.ranks)

    @property
    def end_ns(self) -> int:
        """Last end of any rank."""
        return max(rank.end_ns for rank in self.ranks)

    @property
    def first_token_ns(self) -> int | None:
        """When the last rank had its first token, i.e. when prefill was over everywhere."""
        times = [rank.first_token_ns for rank in self.ranks]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def requests(self) -> tuple[RequestTimeline, ...]:
        """Every request of every rank, in rank order."""
        return tuple(request for rank in self.ranks for request in rank.requests)

    @property
    def cpu_time_s(self) -> float:
        """CPU seconds of all rank processes within the round."""
        return sum(rank.cpu_time_s for rank in self.ranks)
