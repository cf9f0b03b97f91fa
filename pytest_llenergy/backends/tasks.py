# SPDX-License-Identifier: Apache-2.0
"""Tasks of backends: generate, embed, serve; their parameters and results."""

from __future__ import annotations

import math
import random
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.base import Primitive
from pytest_llenergy.model.record import Flag
from pytest_llenergy.model.text import did_you_mean
from pytest_llenergy.model.timeline import RequestTimeline, Span

if TYPE_CHECKING:
    from typing_extensions import Self


# Checked keyword arguments of what a backend is asked to do.


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to do a task; recorded whole."""

    task: ClassVar[str]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check keyword arguments. Raises ``BackendError`` naming the unknown and the impossible ones."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            told = f"known: {', '.join(cls.__struct_fields__)}"
            told = "; ".join(filter(None, (told, did_you_mean(unknown, cls.__struct_fields__))))
            raise BackendError(f"{cls.task}: unknown argument {', '.join(unknown)}; {told}")
        try:
            params = msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise BackendError(f"{cls.task}: {cls._refusal(values, str(error))}") from None
        for name, ok, needs in params.bounds():
            if not ok:
                raise BackendError(f"{cls.task}: {name} is {_shorten(getattr(params, name))}, needs {needs}")
        return params

    @classmethod
    def _refusal(cls, values: Mapping[str, Any], told: str) -> str:
        """What msgspec says of a value, such as ``Expected `int`, got `str` - at `$.seed```, in our words."""
        what, _, place = told.partition(" - at `$.")
        name = re.split(r"\W", place)[0]
        needs = re.sub(r"Expected `(.*)`, got .*", r"\1", what)
        for field in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
            if field.name == name and isinstance(field.type, msgspec.inspect.LiteralType):
                needs = f"one of {', '.join(map(str, field.type.values))}"
        return f"{name} is {values[name]!r}, needs {needs}"

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        """Of each field that has bounds its name, whether it is within them, and what it needs."""
        yield from ()

    def primitives(self) -> dict[str, Primitive]:
        """As recorded: JSON primitives, the entries of a tuple joined by commas."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _shorten(value: object) -> str:
    """In a line: of a long tuple, such as a trace of thousands of requests, how it begins."""
    return reprlib.repr(value) if isinstance(value, tuple) else str(value)


# Generating text: how, and what came of it.


class GenerationParams(Params, frozen=True):
    """How to generate; recorded whole.

    ``ignore_eos`` makes every sequence ``max_new_tokens`` long, which keeps the work of a benchmark
    constant. ``stop_token_ids`` end a sequence like its end-of-sequence token. ``seed`` is set anew
    before every round. ``cache`` is the kind of key-value cache. Sampling needs ``do_sample=True``.
    """

    task: ClassVar[str] = "generate"

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 50
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache: Literal["dynamic", "static"] = "dynamic"

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        yield "max_new_tokens", self.max_new_tokens >= 1, "1 or more"
        yield "temperature", self.temperature > 0, "more than 0; do_sample=False is greedy"
        yield "top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"
        yield "top_k", self.top_k >= 1, "1 or more"
        yield "seed", self.seed >= 0, "0 or more"
        yield "stop_token_ids", min(self.stop_token_ids, default=0) >= 0, "ids of 0 or more"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What ``generate`` returns: one entry a prompt, in the order of the prompts.

    ``token_ids`` are the output tokens as produced, without prompt and padding, with the token that
    ended the sequence. ``requests`` holds counts and times.
    """

    texts: list[str]
    token_ids: list[list[int]]
    requests: list[RequestTimeline]

    @property
    def output_tokens(self) -> int:
        """Output tokens of all sequences."""
        return sum(request.output_tokens for request in self.requests)

    @staticmethod
    def merge(parts: Sequence[Generation]) -> Generation:
        """Join what the ranks made of consecutive parts of a batch."""
        if len(parts) == 1:
            return parts[0]
        return Generation(
            texts=[text for part in parts for text in part.texts],
            token_ids=[ids for part in parts for ids in part.token_ids],
            requests=[request for part in parts for request in part.requests],
        )


# Turning texts into vectors: how, and what came of it.


class EmbeddingParams(Params, frozen=True):
    """How to embed; recorded whole.

    ``pooling`` makes one vector of those of a text's tokens: their ``mean``, that of the first (``cls``) or
    of the ``last`` token. Padding is no token. ``normalize`` scales each vector to length 1.
    """

    task: ClassVar[str] = "embed"

    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = True


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """What ``embed`` returns: one vector a text, in the order of the texts.

    ``requests`` holds the input tokens; there are no output tokens.
    """

    vectors: list[list[float]]
    requests: list[RequestTimeline]

    @property
    def dimension(self) -> int:
        """How long the vectors are."""
        return len(self.vectors[0])

    @staticmethod
    def merge(parts: Sequence[Embedding]) -> Embedding:
        """Join what the ranks made of consecutive parts of a batch."""
        return Embedding(
            vectors=[vector for part in parts for vector in part.vectors],
            requests=[request for part in parts for request in part.requests],
        )


# Serving a load of requests: how they arrive, and what came of it.

#: Requests of a load that says no number.
DEFAULT_REQUESTS = 32

#: The longest that arrivals may take (seconds): what takes longer is a slip, and would look like a hang.
MAX_ARRIVALS_S = 24 * 3600.0


class ServeParams(GenerationParams, frozen=True):
    """How to serve; recorded whole.

    One of three says when requests come. ``request_rate`` (per second) is an open loop: requests are sent
    when their time has come, whatever the server does. ``arrivals="trace"`` is one too, at the times of
    ``trace``, seconds from the start. ``concurrency`` is a closed loop: so many are always on their way.
    Arrivals that take more than a day are refused.

    Prompts are used in turn, ``num_requests`` times in all (32, or one for each time of the trace). ``seed``
    is that of the arrivals too, which are the same in each round. ``prefix_cache=True`` lets the server keep
    prefixes, and takes hits for a part of what is measured.
    """

    task: ClassVar[str] = "serve"

    request_rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    arrivals: Literal["poisson", "trace"] = "poisson"
    trace: tuple[float, ...] = ()
    prefix_cache: bool = False

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        yield from super().bounds()
        is_trace = self.arrivals == "trace"
        # Before what is missing else: who gives a trace wants it used.
        yield "trace", is_trace or not self.trace, "arrivals='trace'"
        one = "one of request_rate, concurrency and arrivals='trace', and no other"
        yield (
            "request_rate",
            (self.request_rate is not None) + (self.concurrency is not None) + is_trace == 1,
            one,
        )
        yield "request_rate", self.request_rate is None or 0 < self.request_rate < float("inf"), "more than 0"
        yield "concurrency", self.concurrency is None or self.concurrency >= 1, "1 or more"
        ordered = all(a <= b < math.inf for a, b in pairwise((0.0, *self.trace)))
        needed = "arrivals='trace', and finite seconds from the start in their order"
        yield "trace", is_trace == bool(self.trace) and ordered, needed
        yield "num_requests", self.num_requests is None or self.num_requests >= 1, "1 or more"
        of_trace = not is_trace or self.num_requests in (None, len(self.trace))
        yield "num_requests", of_trace, "to be left out: the trace says how many"
        last_s = self._last_s()
        in_time = f"arrivals within a day ({MAX_ARRIVALS_S:g} s), and the last one is after {last_s:g} s"
        yield "trace" if is_trace else "request_rate", last_s <= MAX_ARRIVALS_S, in_time

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.trace) if self.trace else self.num_requests or DEFAULT_REQUESTS

    def _last_s(self) -> float:
        """When the last one is to be sent; at once in a closed loop."""
        if self.trace:
            return self.trace[-1]
        return (self.requests - 1) / self.request_rate if self.request_rate else 0.0

    def offsets_s(self) -> tuple[float, ...]:
        """When each is to be sent, seconds from the start; nothing in a closed loop.

        Of a Poisson process the gaps are exponential. They are scaled so that the last of n requests comes
        after (n - 1) / rate seconds: the rate is the one that was asked for, not one that 32 draws happen to
        have. vLLM's and ML.ENERGY's benchmarks do that too.
        """
        if self.trace or self.request_rate is None:
            return self.trace
        draw = random.Random(self.seed)
        gaps = [draw.expovariate(1.0) for _ in range(self.requests - 1)]
        scale = self._last_s() / sum(gaps) if gaps else 0.0
        return (0.0, *(each * scale for each in accumulate(gaps)))


class ServedGeneration(Generation, frozen=True, kw_only=True):
    """A batch that a server generated. ``flags`` are what a reader must know of it.

    ``token_ids`` are empty where the server does not give them. ``cached_tokens`` of the prompts were in its
    prefix cache and not computed; ``None`` where it does not tell.
    """

    cached_tokens: int | None = None

    flags: list[Flag] = []


class ServedLoad(ServedGeneration, frozen=True, kw_only=True):
    """What ``serve`` returns: one entry a request, in the order in which they were to be sent.

    ``exact`` says whether each token came in a chunk of its own. ``spans`` are ramp-up, steady state and
    ramp-down; none where the load had no steady state.
    """

    exact: bool
    spans: list[Span] = []

    @staticmethod
    def merge(parts: Sequence[Generation]) -> ServedLoad:
        """Of one rank: a server has all requests."""
        if len(parts) != 1 or not isinstance(parts[0], ServedLoad):
            raise BackendError(f"serve: a load is served by one rank, not by {len(parts)}")
        return parts[0]


def steady_span(requests: Sequence[RequestTimeline], concurrency: int | None) -> tuple[int, int] | None:
    """When the load was at its level (monotonic nanoseconds); ``None`` if it never was.

    It ends when the last request is sent. In a closed loop it begins when ``concurrency`` requests have had
    their first token, as in ML.ENERGY's benchmark (github.com/ml-energy/benchmark, mlenergy/llm/benchmark.py:
    from the first token of request B to that of request N - B, for N requests that wait in a server of batch
    size B). In an open loop, which has no such number, it begins when the first request is done: with
    Poisson arrivals and equal service times the number in service is stationary from then on (M/D/infinity;
    Eick, Massey and Whitt, The physics of the Mt/G/infinity queue, 1993).
    """
    known = [(each.start_ns, each.first_token_ns, each.last_token_ns) for each in requests]
    sent = [start_ns for start_ns, _, _ in known if start_ns is not None]
    first = sorted(first_ns for _, first_ns, _ in known if first_ns is not None)
    done = [last_ns for _, _, last_ns in known if last_ns is not None]
    if not requests or not len(sent) == len(first) == len(done) == len(requests):
        return None
    if concurrency is not None and concurrency > len(first):
        return None
    start_ns = min(done) if concurrency is None else first[concurrency - 1]
    return (start_ns, max(sent)) if start_ns < max(sent) else None


def phase_spans(
    requests: Sequence[RequestTimeline], concurrency: int | None, start_ns: int, end_ns: int
) -> list[Span]:
    """Ramp-up, steady state and ramp-down of a load that ran from ``start_ns`` to ``end_ns``.

    A token counts where it came; none does where it is not known when each came.
    """
    steady = steady_span(requests, concurrency)
    if steady is None:
        return []
    stamps = [stamp for request in requests for stamp in request.token_ns]
    known = all(len(request.token_ns) == request.output_tokens for request in requests)
    edges = ("ramp-up", start_ns, steady[0]), ("steady", *steady), ("ramp-down", steady[1], end_ns)
    return [
        Span(
            name=name,
            start_ns=start,
            end_ns=end,
            # Of two neighbours the later one has what comes at their edge.
            output_tokens=sum(start <= stamp < end for stamp in stamps) if known else None,
        )
        for name, start, end in edges
    ]


# What a backend can be asked to do, each with its parameters and its result.


class Result(Protocol):
    """What one run of a task made.

    It may have ``flags``, what a reader must know of it, and ``spans``, its phases where it knows them.
    """

    @property
    def requests(self) -> Sequence[RequestTimeline]:
        """Counts and times, one entry an input."""

    @staticmethod
    def merge(parts: Sequence[Any]) -> Any:
        """Join what the ranks made of consecutive parts of the inputs."""


@dataclass(frozen=True)
class Task:
    """``method`` of a backend prepares it; ``params`` are what it can be told, ``result`` what it gives."""

    name: str
    params: type[Params]
    method: str
    result: type[Result]


GENERATE = Task("generate", GenerationParams, "prepare", Generation)
EMBED = Task("embed", EmbeddingParams, "prepare_embedding", Embedding)
SERVE = Task("serve", ServeParams, "prepare_serve", ServedLoad)

TASKS = {task.name: task for task in (GENERATE, EMBED, SERVE)}
