# SPDX-License-Identifier: Apache-2.0
"""Work for ranks, in the shape that the measuring protocol runs: one round at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pytest_llenergy.backends.base import GenerationParams
from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.model.timeline import RankTimeline, RoundTimeline
from pytest_llenergy.workers.byvalue import pickled, unpickled
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.lazy import REFUSAL, is_lazy


class RankWorkload:
    """A job that every rank of a group has prepared. ``peak_memory_bytes`` is the sum over ranks."""

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self.peak_memory_bytes: int | None = None

    def ready(self) -> None:
        """Let every rank collect garbage and finish what its device has queued."""
        self._group.ask_all("ready", None, self._timeout_s)

    def work(self, iterations: int = 1) -> None:
        """Run the job so often on every rank and wait, blocked, for the last."""
        self._group.ask_all("work", iterations, self._timeout_s)

    def timeline(self) -> RoundTimeline:
        """What the ranks noted."""
        answers = self._group.ask_all("timeline", None, self._timeout_s)
        peaks = [peak for _, peak in answers if peak is not None]
        if len(peaks) == len(answers):
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, sum(peaks))
        ranks = tuple(msgspec.json.decode(timeline, type=RankTimeline) for timeline, _ in answers)
        return RoundTimeline(ranks=ranks)

    def run_round(self) -> RoundTimeline:
        """All three, for a round that is not measured."""
        self.ready()
        self.work()
        return self.timeline()

    def results(self) -> list[Any]:
        """What the last round made, by rank."""
        blobs = self._group.ask_all("result", None, self._timeout_s)
        return [_unpickle(blob, rank) for rank, blob in enumerate(blobs)]


def generate_workload(
    group: RankGroup, prompts: Sequence[str], params: GenerationParams, timeout_s: float
) -> RankWorkload:
    """A batch, split over data-parallel ranks into consecutive parts, the longer ones first."""
    parts = split(prompts, len(group.ranks))
    given = msgspec.to_builtins(params)
    group.ask("prepare", [{"prompts": part, "params": given} for part in parts], timeout_s)
    return RankWorkload(group, timeout_s)


def call_workload(
    group: RankGroup,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
) -> RankWorkload:
    """The same call on every rank."""
    group.ask_all("prepare_call", pickle_call(function, args, kwargs), timeout_s)
    return RankWorkload(group, timeout_s)


def split(prompts: Sequence[str], n: int) -> list[list[str]]:
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
        return pickled(function, args, kwargs)
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
        pickled(id, (part,), {})
    except Exception:
        return False
    return True


def _unpickle(blob: bytes, rank: int) -> Any:
    try:
        return unpickled(blob)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Unpickling runs the constructors of whatever the test returned; one may even leave.
        what = f"{type(error).__name__}: {error}"
        raise WorkerError(f"rank {rank}: its result cannot be read in this process ({what})") from error
