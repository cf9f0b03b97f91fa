# SPDX-License-Identifier: Apache-2.0
"""Whether the degree that was asked for is the degree that works: counted, not read from a setting."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from pytest_llenergy.backends.generation import GenerationParams
from pytest_llenergy.conformance.engine import Engine, Made
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.model.record import Parallel, RankInfo
from pytest_llenergy.workers.workload import task_workload

#: What one rank may take that is left alone with its share of the work: so many times what all took together,
#: and at least this long (seconds). One that needs the others waits for ever.
PATIENCE, LEAST_PATIENCE_S = 10.0, 5.0


def processes_seen(engine: Engine, ranks: Sequence[RankInfo], degrees: Parallel) -> str | None:
    """Hold the processes that hold the model against the degrees, by pid."""
    row = engine.spec.capabilities
    wanted = degrees.data * degrees.tensor * degrees.pipeline
    pids = [pid for rank in ranks for pid in (rank.workers if row.launch == "engine" else [rank.pid])]
    living = {pid for pid in pids if psutil.pid_exists(pid)}
    if len(living) == wanted:
        return None
    return f"{wanted} processes should hold the model, and {len(living)} do (pid {pids})"


def shared(engine: Engine, made: Made, degrees: Parallel) -> str | None:
    """Whether each data-parallel rank did a part of the prompts."""
    counts = [len(rank.requests) for rank in made.timeline.ranks if not rank.repeats_others]
    if engine.spec.capabilities.launch == "ranks" and (len(counts) < degrees.data or 0 in counts):
        return f"data={degrees.data}: the ranks did {counts} prompts; each needs some"
    return None


def needs_the_others(engine: Engine, degrees: Parallel, prompt: str) -> str | None:
    """Whether a shard can do its work without the others: then it is no shard, but a whole copy.

    Ends the ranks where they are what they should be.
    """
    group, _ = engine.loaded(degrees)
    params = GenerationParams.of({"max_new_tokens": 4, "ignore_eos": True})
    together = task_workload(group, [prompt], params, engine.timeout_s).run_round()
    alone = [1, *[0] * (len(group.ranks) - 1)]
    try:
        group.ask("work", alone, max(LEAST_PATIENCE_S, PATIENCE * together.duration_s))
    except WorkerError:
        return None
    kind = "tensor" if degrees.tensor > 1 else "pipeline"
    return (
        f"{kind}={max(degrees.tensor, degrees.pipeline)}: rank 0 generates while the others do nothing, so "
        f"it holds a whole copy of the model; shard it, or leave {kind} out of the row"
    )
