# SPDX-License-Identifier: Apache-2.0
"""Work for ranks: batches for a backend, or calls of a function, run one measured round at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pytest_llenergy.backends.tasks import TASKS, Params
from pytest_llenergy.backends.traffic.requests import Inputs, Request
from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.ranks.calls import REFUSAL, UNCOUNTED, TokensPerCall, is_lazy
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.pickling import dump_call, load_result
from pytest_llenergy.ranks.plan import LOCALHOST
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.timeline import RankTimeline, Timeline


class RankWorkload:
    """A job that every rank of a group has prepared. ``timeout_s`` limits each request.

    Each ``replica_size`` consecutive ranks have the same inputs. Only the results of the first of them count.
    The others must have made the same, or hold their host's part of a backend that the first one runs.
    """

    def __init__(self, group: RankGroup, timeout_s: float, slo: Slo | None = None) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._replica_size = group.plan.replica_size
        #: Limits of the latencies of a served load.
        self.slo = slo
        #: The highest sum over ranks in any round, and the highest use of each rank.
        self.peak_memory_bytes: int | None = None
        self.rank_peak_memory_bytes: list[int | None] = [None] * len(group.ranks)

    def prepare_round(self) -> None:
        """Let every rank collect garbage and wait for the queued work of its device."""
        self._request("prepare_round")

    def work(self, iterations: int = 1) -> None:
        """Run the job ``iterations`` times on every rank; blocks until the last rank is done."""
        self._request("work", iterations)

    def timeline(self) -> Timeline:
        """Return the timestamps and token counts of the last round."""
        answers = self._request("timeline")
        peaks = [peak for _, peak in answers]
        self.rank_peak_memory_bytes = list(map(_highest, self.rank_peak_memory_bytes, peaks))
        if None not in peaks:
            self.peak_memory_bytes = _highest(self.peak_memory_bytes, sum(peaks))
        ranks = [
            self._group.to_local_times(msgspec.json.decode(timeline, type=RankTimeline))
            for timeline, _ in answers
        ]
        if self._group.plan.nodes > 1:
            # Their processes work as long as the first rank does.
            ranks = [
                msgspec.structs.replace(rank, iterations=ranks[self._first(number)].iterations)
                for number, rank in enumerate(ranks)
            ]
        self._check_alike([_counts(rank) for rank in ranks], "counts of tokens")
        marked = (
            msgspec.structs.replace(rank, repeats_others=self._first(number) != number)
            for number, rank in enumerate(ranks)
        )
        return Timeline(ranks=tuple(marked))

    def run_round(self) -> Timeline:
        """Run a round that is not measured: ``prepare_round``, ``work`` and ``timeline``."""
        self.prepare_round()
        self.work()
        return self.timeline()

    def results(self) -> list[Any]:
        """Return the results of the last round by rank, without further ranks with the same inputs."""
        results = self._results_of_ranks()
        if self._group.plan.nodes == 1:
            self._check_alike([getattr(each, "token_ids", None) for each in results], "tokens")
        return results[:: self._replica_size]

    def _request(self, verb: str, payload: Any = None) -> list[Any]:
        return self._group.request_all(verb, payload, self._timeout_s)

    def _results_of_ranks(self) -> list[Any]:
        return [_unpickle(answer, rank) for rank, answer in enumerate(self._request("result"))]

    def _first(self, rank: int) -> int:
        """Return the first rank with the same inputs."""
        return rank - rank % self._replica_size

    def _check_alike(self, by_rank: Sequence[object], what: str) -> None:
        """Raise ``WorkerError`` if ranks with the same inputs differ: their results are worthless."""
        for rank, found in enumerate(by_rank):
            first = self._first(rank)
            if found != by_rank[first]:
                raise WorkerError(
                    f"ranks {first} and {rank} hold parts of one model (mark parallel), and their {what} "
                    "differ: the backend or a device is faulty, or output_tokens gives each another number"
                )


class CallsInRanks(RankWorkload):
    """A function that every rank calls, also each that holds a part of one model."""

    def results(self) -> list[Any]:
        """Return the result of the last call of each rank."""
        return self._results_of_ranks()


def task_workload(group: RankGroup, inputs: Inputs, params: Params, timeout_s: float) -> RankWorkload:
    """Prepare a batch, which is split over data-parallel ranks into consecutive parts."""
    size = group.plan.replica_size
    task = {"task": TASKS[params.task].name, "params": msgspec.to_builtins(params)}
    parts = split_prompts(inputs, len(group.ranks) // size)
    group.request("prepare", [{**task, "inputs": part} for part in parts for _ in range(size)], timeout_s)
    return RankWorkload(group, timeout_s, getattr(params, "slo", None))


def call_workload(
    group: RankGroup,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    tokens: TokensPerCall = UNCOUNTED,
) -> CallsInRanks:
    """Prepare the same call of a function, or of one named ``"module:function"``, on every rank."""
    if callable(function) and is_lazy(function):
        raise PlanError(f"workers: {REFUSAL}")
    try:
        call = dump_call(function, (*tokens, *args), kwargs, elsewhere=group.plan.hosts != (LOCALHOST,))
    except Exception as error:
        what = getattr(function, "__qualname__", function)
        why = f"{type(error).__name__}: {error}"
        raise WorkerError(
            f"workers: {what} and what it uses cannot be sent to the ranks ({why}); create it in the function"
        ) from error
    group.request_all("prepare_call", call, timeout_s)
    return CallsInRanks(group, timeout_s)


def split_prompts(prompts: Inputs, n: int) -> list[list[str | Request]]:
    """Split as accelerate's ``split_between_processes`` does: 7 prompts over 2 ranks are 4 and 3."""
    size, extra = divmod(len(prompts), n)
    starts = [rank * size + min(rank, extra) for rank in range(n + 1)]
    return [list(prompts[starts[rank] : starts[rank + 1]]) for rank in range(n)]


def _counts(rank: RankTimeline) -> list[object]:
    return [
        (one.tokens, [(each.input_tokens, each.output_tokens) for each in one.requests])
        for one in rank.iterations
    ]


def _highest(known: int | None, new: int | None) -> int | None:
    return known if new is None else max(known or 0, new)


def _unpickle(result: bytes, rank: int) -> Any:
    try:
        return load_result(result)
    except Exception as error:  # unpickling runs constructors of whatever the test returned
        what = f"{type(error).__name__}: {error}"
        raise WorkerError(f"rank {rank}: its result cannot be read in this process ({what})") from error
