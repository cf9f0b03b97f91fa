# SPDX-License-Identifier: Apache-2.0
"""What a backend can be asked to do: generate and serve, each with its parameters and its result.

Parameters are checked before anything is started, and recorded whole. A result holds one ``RequestTimeline``
per input, in the order of the inputs.
"""

from __future__ import annotations

import hashlib
import math
import random
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import msgspec

from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.text import did_you_mean
from pytest_llenergy.record.timeline import RequestTimeline, Span

if TYPE_CHECKING:
    from typing_extensions import Self


#: Number of requests when a test gives none.
DEFAULT_REQUESTS = 32

#: Longest tuple that is recorded value by value, such as a trace.
MAX_RECORDED_VALUES = 16

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]

#: What every library takes; some cut larger ones to 32 bits in silence, or read them as random.
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keyword arguments of a task."""

    task: ClassVar[str]
    #: Fields that no caller may give.
    internal: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Validate keyword arguments.

        Raises:
            BackendError: An argument is unknown, has the wrong type or is out of bounds.
        """
        accepted = [name for name in cls.__struct_fields__ if name not in cls.internal]
        unknown = sorted(set(values) - set(accepted))
        if unknown:
            known = f"known: {', '.join(accepted)}"
            hint = "; ".join(filter(None, (known, did_you_mean(unknown, accepted))))
            raise BackendError(f"{cls.task}: unknown argument {', '.join(unknown)}; {hint}")
        try:
            params = msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            raise BackendError(f"{cls.task}: {place.rstrip('`')}: {what}") from None
        for name, ok, needs in params.bounds():
            if not ok:
                shown = reprlib.repr(getattr(params, name))
                raise BackendError(f"{cls.task}: {name} is {shown}, needs {needs}")
        return params

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what depends on other fields: a name, whether its value fits, and what it needs."""
        yield from ()

    def primitives(self) -> dict[str, Primitive]:
        """Return the parameters as recorded."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in self.internal}
        return {name: _to_primitive(value) for name, value in values.items()}


def _to_primitive(value: Any) -> Any:
    """Return a tuple as text; of a long one its number, last value and digest."""
    if not isinstance(value, tuple):
        return str(value) if isinstance(value, Slo) else value
    text = ",".join(map(str, value))
    if len(value) <= MAX_RECORDED_VALUES:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(value)} values to {value[-1]:g}, digest {digest}"


class GenerationParams(Params, frozen=True):
    """Parameters of ``generate``.

    Attributes:
        do_sample: Sample; greedy otherwise.
        seed: Set anew before every round.
        ignore_eos: Make every sequence ``max_new_tokens`` long, which keeps the work of a benchmark constant.
        stop_token_ids: End a sequence like its end-of-sequence token.
        cache: Kind of key-value cache.
    """

    task: ClassVar[str] = "generate"

    max_new_tokens: Positive = 64
    do_sample: bool = False
    temperature: AboveZero = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Positive = 50
    seed: Seed = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[NotNegative, ...] = ()
    cache: Literal["dynamic", "static"] = "dynamic"

    @property
    def drawn(self) -> dict[str, Any]:
        """``temperature``, ``top_p`` and ``top_k`` by name; empty for greedy decoding."""
        names = ("temperature", "top_p", "top_k") if self.do_sample else ()
        return {name: getattr(self, name) for name in names}


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``generate``: one entry per prompt, in order.

    Attributes:
        texts: Detokenised outputs.
        token_ids: Output tokens as produced, without prompt and padding, including the token that ended the
            sequence.
        requests: Token counts and timestamps.
        flags: What a reader must know about the result.
    """

    texts: list[str]
    token_ids: list[list[int]]
    requests: list[RequestTimeline]
    flags: list[Flag] = []

    def __repr__(self) -> str:
        first = f": {reprlib.repr(self.texts[0])}" if self.texts else ""
        outputs, tokens = len(self.texts), self.output_tokens
        return f"<{type(self).__name__} of {outputs} outputs, {tokens} output tokens{first}>"

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all sequences."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in a prefix cache and not computed; None if unknown."""
        known = [each.cached_tokens for each in self.requests if each.cached_tokens is not None]
        return sum(known) if len(known) == len(self.requests) else None

    @staticmethod
    def merge(parts: Sequence[Generation]) -> Generation:
        """Join the ranks' results for consecutive parts of a batch."""
        if len(parts) == 1:
            return parts[0]
        return Generation(
            texts=[text for part in parts for text in part.texts],
            token_ids=[ids for part in parts for ids in part.token_ids],
            requests=[request for part in parts for request in part.requests],
            flags=list(dict.fromkeys(flag for part in parts for flag in part.flags)),
        )


def cut_at_end(row: list[int], ends: Set[int]) -> list[int]:
    """Return a row of a static batch up to and including the first token that ends it, without padding."""
    return next((row[: index + 1] for index, token in enumerate(row) if token in ends), row)


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a search for the maximum load sends one of its loads.

    Round k of each rate has the arrivals of seed + k. A load ends early once its result is certain.

    Attributes:
        warmups: Runs before the first round, which send only a few requests.
        allowed: Requests of all rounds together that may miss the SLO.
    """

    warmups: int
    allowed: int


class ServeParams(GenerationParams, frozen=True):
    """Parameters of ``serve``: ``request_rate``, a trace, or ``concurrency`` alone.

    Prompts are used in turn. Arrivals are the same in each round, except in a search.

    Attributes:
        request_rate: Open loop: requests per second, sent on schedule whatever the server does.
        concurrency: Closed loop: number of requests always in flight. With a rate or a trace: the most
            requests in flight; others wait their turn.
        num_requests: Total number of requests; by default 32, or the number of ``Request`` objects.
        arrivals: ``poisson``, seeded by ``seed``, or ``trace``.
        burstiness: With a rate: shape of the gamma distribution of the gaps. 1 is a Poisson process, less is
            burstier, more is more even.
        trace: Open loop: send times in seconds from the start.
        prefix_cache: Let the server keep prefixes, and count cache hits as part of the measured work.
        endpoint: ``completions`` sends texts, ``chat`` messages.
        max_failures: Most requests of a round that may fail without failing the test. In ``max_load``, a load
            with more exceeds the SLO.
        request_timeout_s: Longest time of a request (seconds), after which it has failed; None for any.
        slo: Limits of the latencies, from ``pytest_llenergy.slo``, which give goodput.
        probe: Set by ``energy.max_load``.
    """

    task: ClassVar[str] = "serve"
    internal: ClassVar[frozenset[str]] = frozenset({"probe"})

    request_rate: AboveZero | None = None
    concurrency: Positive | None = None
    num_requests: Positive | None = None
    arrivals: Literal["poisson", "trace"] = "poisson"
    burstiness: AboveZero = 1.0
    trace: tuple[float, ...] = ()
    prefix_cache: bool = False
    endpoint: Literal["completions", "chat"] = "completions"
    max_failures: NotNegative = 0
    request_timeout_s: AboveZero | None = None
    slo: Slo | None = None
    probe: Probe | None = None

    def bounds(self) -> Iterator[tuple[str, bool, str]]:
        is_trace = self.arrivals == "trace"
        # Checked first, since a test that gives a trace expects it to be used.
        yield "trace", is_trace or not self.trace, "arrivals='trace'"
        paced = (self.request_rate is not None) + is_trace
        one = "one of request_rate, arrivals='trace' and concurrency; concurrency may limit the other two"
        yield "request_rate", paced == 1 or (paced == 0 and self.concurrency is not None), one
        ordered = all(a <= b < math.inf for a, b in pairwise((0.0, *self.trace)))
        needed = "finite seconds from the start, in ascending order"
        yield "trace", is_trace == bool(self.trace) and ordered, needed
        of_trace = not is_trace or self.num_requests in (None, len(self.trace))
        yield "num_requests", of_trace, "to be left out: the trace says how many; see limit= of dataset()"
        yield "burstiness", self.burstiness == 1 or self.request_rate is not None, "a request_rate"

    @property
    def requests(self) -> int:
        """Total number of requests."""
        return len(self.trace) if self.trace else self.num_requests or DEFAULT_REQUESTS

    @property
    def slots(self) -> int | None:
        """Requests always in flight of a closed loop; None for an open loop."""
        return None if self.trace or self.request_rate is not None else self.concurrency

    def offsets_s(self, number: int = 0) -> tuple[float, ...]:
        """Return the send time of each request in seconds from the start; empty in a closed loop.

        ``number`` is added to the seed.

        Gaps follow a gamma distribution, which is exponential for a ``burstiness`` of 1. They are scaled so
        that the last of n requests is sent after (n - 1) / rate seconds: the rate is then the requested one,
        not the one of 32 random draws. The benchmarks of vLLM and ML.ENERGY do the same.
        """
        if self.trace or self.request_rate is None:
            return self.trace
        draw = random.Random(self.seed + number)
        gaps = [draw.gammavariate(self.burstiness, 1.0) for _ in range(self.requests - 1)]
        scale = (self.requests - 1) / self.request_rate / sum(gaps) if gaps else 0.0
        return (0.0, *(each * scale for each in accumulate(gaps)))


class ServedLoad(Generation, frozen=True, kw_only=True):
    """Result of ``serve``: one entry per request, in the order of their send times.

    Attributes:
        exact: Whether each token arrived in its own chunk.
        spans: Ramp-up, steady state and ramp-down; empty if the load had no steady state, of which ``flags``
            have the reason.
        failures: Why requests failed, one message each. They are in no other list.
    """

    exact: bool
    spans: list[Span] = []
    failures: list[str] = []

    @staticmethod
    def merge(parts: Sequence[Generation]) -> ServedLoad:
        """Return the only part: one rank serves the whole load."""
        if len(parts) != 1 or not isinstance(parts[0], ServedLoad):
            raise BackendError(f"serve: a load is served by one rank, not by {len(parts)}")
        return parts[0]


class Result(Protocol):
    """Result of one execution of a task.

    It can also have ``flags``, which a reader must know, and ``spans``, its phases.
    """

    @property
    def requests(self) -> Sequence[RequestTimeline]:
        """Token counts and timestamps, one entry per input."""

    @staticmethod
    def merge(parts: Sequence[Any]) -> Any:
        """Join the ranks' results for consecutive parts of the inputs."""


@dataclass(frozen=True)
class Task:
    """A task: the backend method that prepares it, its parameters and its result."""

    name: str
    params: type[Params]
    method: str
    result: type[Result]


GENERATE = Task("generate", GenerationParams, "prepare", Generation)
SERVE = Task("serve", ServeParams, "prepare_serve", ServedLoad)

TASKS = {task.name: task for task in (GENERATE, SERVE)}
