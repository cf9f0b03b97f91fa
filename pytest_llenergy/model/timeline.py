# SPDX-License-Identifier: Apache-2.0
"""What a rank reports of a round: timestamps, counts and floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llenergy.model.record import Flag

# What a rank says about one round: monotonic timestamps and counts, no energy.
#
# All times are nanoseconds of ``CLOCK_MONOTONIC``, which is one clock for every process of a host, so
# the process that reads the meters can join them with its trace.


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a batch.

    ``output_tokens`` counts what was produced, up to and including the end-of-sequence token; padding
    is not output. ``start_ns`` is when it was given to the engine, ``None`` where that is the start of the
    iteration. The times of the first and the last token are ``None`` when the engine does not say when tokens
    appeared. ``token_ns`` has that of each, or nothing where they are not known one by one.
    """

    input_tokens: int
    output_tokens: int
    start_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    token_ns: tuple[int, ...] = ()


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phase that a task knows itself; ``output_tokens`` are those that came in it, where that is known."""

    name: str
    start_ns: int
    end_ns: int
    output_tokens: int | None = None


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition of the work on one rank, or ``repeats`` without a look at the clock in between.

    ``spans`` are its phases in their order where the task knows them itself, as a served load does, and
    ``None`` where they are those of a batch, prefill and decode.
    """

    start_ns: int
    end_ns: int
    repeats: int = 1
    requests: tuple[RequestTimeline, ...] = ()
    spans: tuple[Span, ...] | None = None

    @property
    def first_token_ns(self) -> int | None:
        """When its last request had its first token; ``None`` where the engine does not say."""
        first = [request.first_token_ns for request in self.requests]
        known = [time_ns for time_ns in first if time_ns is not None]
        return max(known) if known and len(known) == len(first) else None


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on one rank. ``cpu_time_s`` is the CPU time of the rank's process within it, and of those of
    an engine.

    ``processes`` are pids that belong to what is measured although the rank has not started them; what these
    have started does as well. ``flags`` are what the engine says of the round.

    ``repeats_others`` is true where several ranks work on the same requests, such as shards of one model, for
    all of them but one: its requests are those of that one.
    """

    rank: int
    iterations: tuple[Iteration, ...]
    cpu_time_s: float
    repeats_others: bool = False
    processes: tuple[int, ...] = ()
    flags: tuple[Flag, ...] = ()

    @property
    def requests(self) -> tuple[RequestTimeline, ...]:
        """Every request of every iteration, once."""
        if self.repeats_others:
            return ()
        return tuple(request for iteration in self.iterations for request in iteration.requests)


class RoundTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on all its ranks: the window runs from the first start to the last end."""

    ranks: tuple[RankTimeline, ...]

    @property
    def start_ns(self) -> int:
        """First start of any rank."""
        return min(rank.iterations[0].start_ns for rank in self.ranks)

    @property
    def end_ns(self) -> int:
        """Last end of any rank."""
        return max(rank.iterations[-1].end_ns for rank in self.ranks)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def iterations(self) -> int:
        """How often each rank did the work."""
        return sum(iteration.repeats for iteration in self.ranks[0].iterations)

    @property
    def served(self) -> bool:
        """Whether it was a load of requests, which has phases of its own, or none."""
        return any(each.spans is not None for rank in self.ranks for each in rank.iterations)

    @property
    def processes(self) -> frozenset[int]:
        """Processes that are measured although no rank has started them."""
        return frozenset(pid for rank in self.ranks for pid in rank.processes)

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What the engine says of the round, each once."""
        return tuple(dict.fromkeys(flag for rank in self.ranks for flag in rank.flags))

    @property
    def borders_ns(self) -> tuple[tuple[int, int], ...]:
        """For each iteration its start and the moment when prefill was over on every rank.

        Empty where the engine does not say, or where the iterations of the ranks overlap.
        """
        borders: list[tuple[int, int]] = []
        last_ns = self.start_ns
        for parts in zip(*(rank.iterations for rank in self.ranks), strict=True):
            start_ns = min(part.start_ns for part in parts) if borders else self.start_ns
            first = [part.first_token_ns for part in parts]
            known = [time_ns for time_ns in first if time_ns is not None]
            if len(known) < len(first) or not last_ns <= start_ns <= max(known) <= self.end_ns:
                return ()
            last_ns = max(known)
            borders.append((start_ns, last_ns))
        return tuple(borders)

    @property
    def requests(self) -> tuple[RequestTimeline, ...]:
        """Every request of every rank, in rank order."""
        return tuple(request for rank in self.ranks for request in rank.requests)

    @property
    def cpu_time_s(self) -> float:
        """CPU seconds of all rank processes within the round."""
        return sum(rank.cpu_time_s for rank in self.ranks)


# Floating-point operations of one iteration, as a rank tells them.

FUNCTION_FLOPS_REASON = (
    "only those of a backend are counted; a function can use torch.utils.flop_counter itself"
)


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that one iteration executes: a multiplication and an addition are two.

    ``count`` is ``None`` where they cannot be told, for the ``reason``; ``source`` says how they were
    counted. ``shared`` is true where ``count`` is that of all ranks that work on the same inputs, and false
    where it is the rank's own.
    """

    count: int | None
    source: str | None = None
    shared: bool = False
    reason: str | None = None

    @staticmethod
    def unknown(reason: str) -> Flops:
        """Where they cannot be told."""
        return Flops(count=None, reason=reason)


def sum_flops(told: Sequence[Flops], together: int = 1) -> Flops:
    """Those of all ranks, of which each ``together`` consecutive ones work on the same inputs."""
    lacking = next((each for each in told if each.count is None), None)
    if lacking is not None:
        return lacking
    counts = [each.count or 0 for rank, each in enumerate(told) if not each.shared or rank % together == 0]
    sources = dict.fromkeys(each.source for each in told if each.source is not None)
    return Flops(count=sum(counts), source="; ".join(sources))
