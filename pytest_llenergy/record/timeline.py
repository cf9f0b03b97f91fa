# SPDX-License-Identifier: Apache-2.0
"""The report of a rank on a round: timestamps and counts, but no energy.

Times are nanoseconds of ``CLOCK_MONOTONIC``, which is one clock for all processes of a host. The process that
reads the meters can therefore join them with its trace. Those of other hosts are converted first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pytest_llenergy.record.record import Flag, Tokens

Times = TypeVar("Times", bound=msgspec.Struct)


def convert_times(record: Times, convert: Callable[[int], int]) -> Times:
    """Return a record with all its times (``*_ns``) converted, also those of records in it."""

    def convert_value(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert_value(name, each) for each in value)
        if isinstance(value, msgspec.Struct):
            return convert_times(value, convert)
        return convert(value) if name.endswith("_ns") and value is not None else value

    changes = {name: convert_value(name, getattr(record, name)) for name in record.__struct_fields__}
    return msgspec.structs.replace(record, **changes)


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a batch.

    Attributes:
        output_tokens: Tokens produced, including the end-of-sequence token and without padding.
        start_ns: When the backend received it; None for the start of the iteration.
        due_ns: When it was to be sent, if a limit on requests in flight can hold it back.
        cached_tokens: Tokens of the prompt found in a prefix cache; None if unknown.
        first_token_ns: None if the backend does not report token times; ``last_token_ns`` likewise.
        token_ns: Time of each token, or empty if they are not known one by one.
        chunk_ns: When each chunk of a stream arrived, if one of them held several tokens.
        drafted_tokens: Tokens that speculative decoding proposed; None without it.
        accepted_tokens: Drafted tokens that the model has confirmed. They are part of the output.
    """

    input_tokens: int
    output_tokens: int
    start_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    token_ns: tuple[int, ...] = ()
    chunk_ns: tuple[int, ...] = ()
    due_ns: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    cached_tokens: int | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phase that the task reports itself. ``output_tokens`` were produced in it, if known."""

    name: str
    start_ns: int
    end_ns: int
    output_tokens: int | None = None


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition of the work on one rank, or ``repeats`` without reading the clock in between.

    ``spans`` are phases in order if the task reports them, as a served load does. They are None for a batch,
    whose phases are prefill and decode. ``failures`` are the messages of failed requests, which are not
    among ``requests``. ``tokens`` are those of a function, which has no requests, if the test tells them.
    """

    start_ns: int
    end_ns: int
    repeats: int = 1
    requests: tuple[RequestTimeline, ...] = ()
    spans: tuple[Span, ...] | None = None
    failures: tuple[str, ...] = ()
    tokens: Tokens | None = None

    @property
    def first_token_ns(self) -> int | None:
        """When every request had its first token; None if the backend does not report it."""
        first = [request.first_token_ns for request in self.requests]
        known = [time_ns for time_ns in first if time_ns is not None]
        return max(known) if known and len(known) == len(first) else None


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on one rank.

    Attributes:
        cpu_time_s: CPU time of the rank and of the backend's processes within the round.
        repeats_others: Whether another rank reports the same requests, as shards of one model do.
        servers: Pids of a server, started by the rank or running before. Their descendants belong to the
            measurement as well, and each leased board must have one of these processes.
        flags: What the backend reports about the round.
    """

    rank: int
    iterations: tuple[Iteration, ...]
    cpu_time_s: float
    repeats_others: bool = False
    servers: tuple[int, ...] = ()
    flags: tuple[Flag, ...] = ()

    @property
    def requests(self) -> tuple[RequestTimeline, ...]:
        """Every request of every iteration; empty if another rank reports them."""
        if self.repeats_others:
            return ()
        return tuple(request for iteration in self.iterations for request in iteration.requests)


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One round on all ranks: its window runs from the first start to the last end."""

    ranks: tuple[RankTimeline, ...]

    @property
    def start_ns(self) -> int:
        """When the first rank started."""
        return min(rank.iterations[0].start_ns for rank in self.ranks)

    @property
    def end_ns(self) -> int:
        """When the last rank ended."""
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
        """Whether it was a served load, which reports its phases itself."""
        return any(each.spans is not None for rank in self.ranks for each in rank.iterations)

    @property
    def servers(self) -> frozenset[int]:
        """Pids of the server that is measured, if it is one."""
        return frozenset(pid for rank in self.ranks for pid in rank.servers)

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What the backend reports about the round, without duplicates."""
        return tuple(dict.fromkeys(flag for rank in self.ranks for flag in rank.flags))

    @property
    def borders_ns(self) -> tuple[tuple[int, int], ...]:
        """The start of each iteration, and when prefill was over on every rank.

        Empty if the backend does not report it, or if iterations of the ranks overlap.
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
    def failures(self) -> tuple[str, ...]:
        """Why requests failed, one message each."""
        reporting = (rank for rank in self.ranks if not rank.repeats_others)
        return tuple(why for rank in reporting for each in rank.iterations for why in each.failures)

    @property
    def cpu_time_s(self) -> float:
        """CPU seconds of all rank processes within the round."""
        return sum(rank.cpu_time_s for rank in self.ranks)
