# SPDX-License-Identifier: Apache-2.0
"""One model over two hosts: real agents and a small engine that is launched symmetrically."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import HostDevices, ProcessPlan, plan_on_hosts
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.usage import cpu_times_s
from pytest_llenergy.ranks.workload import task_workload
from pytest_llenergy.record.record import Parallel

from ..ranks.survivors import alive, await_none, marked
from . import spread_engine
from .remote_ranks import Gang, open_gang

PROMPTS = ["abc", "hello world"]


def plan(degrees: Parallel, each: int = 1) -> ProcessPlan:
    holds = [
        HostDevices(name, Lease(devices=tuple(f"GPU-{name}{number}" for number in range(each))), [0, 1])
        for name in ("n1", "n2")
    ]
    row = spread_engine.SPEC.capabilities
    return plan_on_hosts(row, degrees, holds, 1)


@contextmanager
def loaded(gang: Gang, degrees: Parallel, each: int = 1, **options: float) -> Iterator[RankGroup]:
    """Load the engine on both hosts."""
    pool = RankPool(60.0, "spawn", "module")
    try:
        pool.use_hosts(gang.hosts)
        load = Load(spread_engine.SPEC, ModelSource("hub", "owner/name"), options)
        yield pool.get_loaded(plan(degrees, each), load)[0]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_model_is_spread_over_hosts_and_counted_once(gang: Gang) -> None:
    with loaded(gang, Parallel(tensor=2, pipeline=2), each=2) as group:
        workload = task_workload(group, PROMPTS, GenerationParams(max_new_tokens=5), 60.0)
        workload.prepare_round()
        workload.work(2)
        timeline = workload.timeline()
        (generation,) = workload.results()
        pids = [pid for rank in group.ranks for pid in rank.workers]
        # 1 + 2 + 3 + 4: all workers of both hosts have taken part.
        assert generation.token_ids == [[10] * 5] * 2
        assert [(each.input_tokens, each.output_tokens) for each in timeline.requests] == [
            (3, 5),
            (11, 5),
        ] * 2
        assert [rank.repeats_others for rank in timeline.ranks] == [False, True]
        assert len(timeline.borders_ns) == 2
        first, second = timeline.ranks
        assert (second.iterations, second.rank) == (first.iterations, 1)
        assert second.cpu_time_s > 0
        assert [(rank.host, rank.device, len(rank.workers)) for rank in group.ranks] == [
            ("n1", "GPU-n10,GPU-n11", 2),
            ("n2", "GPU-n20,GPU-n21", 2),
        ]
        places = [(each.pipeline, each.tensor) for rank in group.ranks for each in rank.worker_coordinates]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len(set(pids)) == 4
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_the_cpu_time_of_a_part_reaches_to_the_end_of_the_work(gang: Gang) -> None:
    """Its rank has nothing to do, and its processes go on until the first rank has answered."""
    with loaded(gang, Parallel(tensor=2), token_s=0.0) as group:
        (pid,) = group.ranks[1].workers
        workload = task_workload(group, PROMPTS, GenerationParams(max_new_tokens=500), 60.0)
        workload.prepare_round()
        before = cpu_times_s([pid])[pid]
        workload.work()
        used_s = cpu_times_s([pid])[pid] - before
        found = workload.timeline().ranks[1].cpu_time_s
    assert found > 0.5 * used_s


@pytest.mark.parametrize("ends", ["agent", "first worker"])
@pytest.mark.slow
def test_the_end_of_a_part_ends_all_and_names_its_host(tmp_path: Path, ends: str) -> None:
    with marked() as mark:
        require_end(tmp_path, ends)
        assert await_none(mark) == {}


def require_end(directory: Path, ends: str) -> None:
    """Kill one process while the model generates, and require the right error."""
    with open_gang(directory) as gang, loaded(gang, Parallel(tensor=2), token_s=0.05) as group:
        pid = {"first worker": group.ranks[0].workers[0], "agent": gang.clients[1].facts.pid}[ends]
        message = {
            "first worker": r"^rank 0 of 2 on n1 \(GPU-n10, pid \d+\): RuntimeError: worker 0 ended .* -9",
            "agent": r"^n2: .*; rank 1 of 2 ended with it",
        }[ends]
        workload = task_workload(group, PROMPTS, GenerationParams(max_new_tokens=100_000), 120.0)
        workload.prepare_round()
        killer = Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        start_s = time.monotonic()
        with pytest.raises(WorkerError, match=message):
            workload.work()
        assert time.monotonic() - start_s < 30
