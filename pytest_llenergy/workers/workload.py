# SPDX-License-Identifier: Apache-2.0
"""Work for ranks, in the shape that the measuring protocol runs: one round at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pytest_llenergy.backends.tasks import TASKS, Params
from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.model.timeline import Flops, RankTimeline, RoundTimeline, sum_flops
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.pickling import REFUSAL, dump_call, is_lazy, load_result


class RankWorkload:
    """A job that every rank of a group has prepared.

    ``peak_memory_bytes`` is the highest sum over ranks in any round, ``rank_peak_memory_bytes`` the highest
    use of each rank.

    Each ``together`` consecutive ranks have the same inputs; what they made is told of the first of them, and
    what the others made must be the same.
    """

    def __init__(self, group: RankGroup, timeout_s: float, together: int = 1) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._together = together
        self.peak_memory_bytes: int | None = None
        self.rank_peak_memory_bytes: list[int | None] = [None] * len(group.ranks)

    def ready(self) -> None:
        """Let every rank collect garbage and finish what its device has queued."""
        self._group.request_all("ready", None, self._timeout_s)

    def work(self, iterations: int = 1) -> None:
        """Run the job so often on every rank and wait, blocked, for the last."""
        self._group.request_all("work", iterations, self._timeout_s)

    def timeline(self) -> RoundTimeline:
        """What the ranks noted.

        Raises ``WorkerError`` when ranks with the same inputs have not made equally many tokens.
        """
        answers = self._group.request_all("timeline", None, self._timeout_s)
        peaks = [peak for _, peak in answers if peak is not None]
        if len(peaks) == len(answers):
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, sum(peaks))
        highest = zip(self.rank_peak_memory_bytes, (peak for _, peak in answers), strict=True)
        self.rank_peak_memory_bytes = [_higher(*both) for both in highest]
        ranks = [msgspec.json.decode(timeline, type=RankTimeline) for timeline, _ in answers]
        if self._together > 1:
            self._check_alike([_counts(rank) for rank in ranks], "counts of tokens")
        told = (
            msgspec.structs.replace(rank, repeats_others=number % self._together > 0)
            for number, rank in enumerate(ranks)
        )
        return RoundTimeline(ranks=tuple(told))

    def run_round(self) -> RoundTimeline:
        """All three, for a round that is not measured."""
        self.ready()
        self.work()
        return self.timeline()

    def flops(self) -> Flops:
        """Floating-point operations of one iteration on all ranks, which may run the job once more for it."""
        answers = self._group.request_all("flops", None, self._timeout_s)
        return sum_flops([msgspec.json.decode(answer, type=Flops) for answer in answers], self._together)

    def results(self) -> list[Any]:
        """What the last round made, by rank; of ranks with the same inputs by the first of them.

        Raises ``WorkerError`` when these have not made the same tokens.
        """
        blobs = self._group.request_all("result", None, self._timeout_s)
        made = [_unpickle(blob, rank) for rank, blob in enumerate(blobs)]
        if self._together > 1:
            self._check_alike([getattr(each, "token_ids", []) for each in made], "tokens")
        return made[:: self._together]

    def _check_alike(self, of_ranks: Sequence[list[Any]], what: str) -> None:
        """Shards of one model that do not agree have not worked on one text: what they made is nothing."""
        for rank, found in enumerate(of_ranks):
            first = rank - rank % self._together
            if found != of_ranks[first]:
                raise WorkerError(
                    f"ranks {first} and {rank} work on the same prompts as parts of one model, and their "
                    f"{what} differ ({_first_difference(of_ranks[first], found)}): this is no result, but a "
                    "fault of the engine or of a device"
                )


def task_workload(group: RankGroup, inputs: Sequence[str], params: Params, timeout_s: float) -> RankWorkload:
    """A batch, split over data-parallel ranks into consecutive parts, the longer ones first."""
    together = group.plan.together
    parts = split_prompts(inputs, len(group.ranks) // together)
    told = {"task": TASKS[params.task].name, "params": msgspec.to_builtins(params)}
    payloads = [{**told, "inputs": part} for part in parts for _ in range(together)]
    group.request("prepare", payloads, timeout_s)
    return RankWorkload(group, timeout_s, together)


def call_workload(
    group: RankGroup,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
) -> RankWorkload:
    """The same call on every rank."""
    group.request_all("prepare_call", pickle_call(function, args, kwargs), timeout_s)
    return RankWorkload(group, timeout_s)


def _higher(before: int | None, now: int | None) -> int | None:
    return before if now is None else max(before or 0, now)


def split_prompts(prompts: Sequence[str], n: int) -> list[list[str]]:
    """Share out as accelerate's ``split_between_processes`` does: 7 over 2 ranks is 4 and 3."""
    size, extra = divmod(len(prompts), n)
    parts: list[list[str]] = []
    start = 0
    for rank in range(n):
        end = start + size + (1 if rank < extra else 0)
        parts.append(list(prompts[start:end]))
        start = end
    return parts


def pickle_call(function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle by value what lives in the user's own modules: a rank may not be able to import them.

    A name, ``"module:function"``, is imported in the rank.
    """
    if callable(function) and is_lazy(function):
        raise PlanError(f"workers: {REFUSAL}")
    try:
        return dump_call(function, args, kwargs)
    except Exception as error:
        what = getattr(function, "__qualname__", function)
        why = f"{type(error).__name__}: {error}"
        place = next((name for name, part in _parts(function, args, kwargs) if not _can_be_sent(part)), None)
        remedy = f": make what is in {place} within the function" if place is not None else ""
        raise WorkerError(
            f"workers: {what} and its arguments cannot be sent to the ranks ({why}){remedy}"
        ) from error


def _parts(
    function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """What goes to the ranks with a call, each with its place, as far as Python tells."""
    yield from ((f"argument {number}", each) for number, each in enumerate(args, 1))
    yield from ((f"argument {name!r}", each) for name, each in kwargs.items())
    with suppress(TypeError, ValueError):
        used = inspect.getclosurevars(inspect.unwrap(function))  # type: ignore[arg-type]
        yield from ((f"variable {name!r}", each) for name, each in {**used.nonlocals, **used.globals}.items())


def _can_be_sent(part: Any) -> bool:
    try:
        dump_call(id, (part,), {})
    except Exception:
        return False
    return True


def _counts(rank: RankTimeline) -> list[str]:
    """Of each request of each iteration."""
    requests = [request for iteration in rank.iterations for request in iteration.requests]
    return [f"{request.input_tokens} in, {request.output_tokens} out" for request in requests]


def _first_difference(first: list[Any], other: list[Any]) -> str:
    """Where what was made of the same prompts parts."""
    for index, (one, two) in enumerate(zip(first, other, strict=False)):
        if one == two:
            continue
        if isinstance(one, str):
            return f"request {index}: {one} and {two}"
        same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
        return f"request {index} from token {same} on: {one[same : same + 3]} and {two[same : same + 3]}"
    return f"{len(first)} and {len(other)} requests"


def _unpickle(blob: bytes, rank: int) -> Any:
    try:
        return load_result(blob)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Unpickling runs the constructors of whatever the test returned; one may even leave.
        what = f"{type(error).__name__}: {error}"
        raise WorkerError(f"rank {rank}: its result cannot be read in this process ({what})") from error
