# SPDX-License-Identifier: Apache-2.0
"""What runs, held against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llenergy.errors import WorkerPlacementError
from pytest_llenergy.model.record import RankInfo
from pytest_llenergy.workers.plan import ProcessPlan


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
