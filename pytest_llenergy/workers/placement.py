# SPDX-License-Identifier: Apache-2.0
"""What runs, held against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import psutil

from pytest_llenergy.backends.base import EngineWorker
from pytest_llenergy.errors import WorkerPlacementError
from pytest_llenergy.model.record import RankInfo
from pytest_llenergy.workers.plan import LOCALHOST, ProcessPlan


def check_placement(plan: ProcessPlan, seen: Sequence[Mapping[str, Any]]) -> tuple[RankInfo, ...]:
    """The ranks as records tell them, of what each saw of itself. Both in rank order.

    Raises ``WorkerPlacementError`` naming both sides where they differ.
    """
    pids = {(rank.host, facts["pid"]) for rank, facts in zip(plan.ranks, seen, strict=True)}
    if len(pids) != len(plan.ranks):
        raise WorkerPlacementError(f"planned {len(plan.ranks)} processes, found {len(pids)}")
    for planned, facts in zip(plan.ranks, seen, strict=True):
        found = ",".join(facts["devices"])
        if found != planned.device:
            raise WorkerPlacementError(f"rank {planned.rank}: planned on {planned.device}, found on {found}")
        if plan.framework == "torch" and facts["world_size"] != planned.world_size:
            raise WorkerPlacementError(
                f"rank {planned.rank}: planned in a world of {planned.world_size}, found in one of "
                f"{facts['world_size']}"
            )
    return tuple(
        RankInfo(
            rank=planned.rank,
            local_rank=planned.local_rank,
            pid=facts["pid"],
            device=",".join(facts["devices"]),
            threads=facts["threads"],
            cpus=facts["cpus"],
            host=planned.host,
        )
        for planned, facts in zip(plan.ranks, seen, strict=True)
    )


def check_workers(
    plan: ProcessPlan, ranks: Sequence[RankInfo], workers: Sequence[Sequence[EngineWorker]]
) -> tuple[RankInfo, ...]:
    """The ranks with the processes that the engine in each has started, in the order of the engine's ranks.

    Raises ``WorkerPlacementError`` where these are not as many as the plan gives a replica, where they see
    another world, or where one is not there.
    """
    if plan.launch != "engine":
        return tuple(ranks)
    return tuple(
        msgspec.structs.replace(rank, workers=_checked(plan, rank, found))
        for rank, found in zip(ranks, workers, strict=True)
    )


def _checked(plan: ProcessPlan, rank: RankInfo, workers: Sequence[EngineWorker]) -> list[int]:
    degrees = plan.parallel
    planned = degrees.tensor * degrees.pipeline * (degrees.data // len(plan.ranks))
    ordered = sorted(workers, key=lambda worker: worker.rank)
    pids = [worker.pid for worker in ordered]
    worlds = sorted({worker.world_size for worker in ordered})
    said = f"{len(set(pids))} processes (pid {', '.join(map(str, pids))}) in a world of {worlds}"
    if len(set(pids)) != planned or worlds != [degrees.tensor * degrees.pipeline]:
        raise WorkerPlacementError(
            f"rank {rank.rank}: planned {planned} processes of the engine, tensor {degrees.tensor} by "
            f"pipeline {degrees.pipeline}; found {said}"
        )
    if rank.host == LOCALHOST:
        here = {rank.pid, *(child.pid for child in psutil.Process(rank.pid).children(recursive=True))}
        attached = {worker.pid for worker in ordered if worker.attached}
        strangers = [pid for pid in pids if pid not in here and pid not in attached]
        if strangers:
            raise WorkerPlacementError(
                f"rank {rank.rank}: the engine names processes that are not its own: {strangers}"
            )
    return [pid for pid in pids if pid]
