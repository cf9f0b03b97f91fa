# SPDX-License-Identifier: Apache-2.0
"""Backends with ``launch="backend"``: one rank for each replica, which starts processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import WorkerPlacementError
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.record.record import Parallel

#: Importable in the ranks, which have the search path of this process.
BACKEND_CODE = """
import subprocess
from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.record.record import BackendInfo

class StartingBackend:
    def load(self, model, options, context):
        self.world = options.get("world", 2)
        self.started = [subprocess.Popen(["sleep", "60"]) for _ in range(options["starts"])]
        self.pids = [each.pid for each in self.started]
        return BackendInfo(name="starting", version=str(context.devices), model=model.label)
    def workers(self):
        return [BackendWorker(pid=pid, rank=n, world_size=self.world) for n, pid in enumerate(self.pids)]
    def synchronize(self): pass
    def close(self): pass
"""
BACKEND_LAUNCH = Capabilities(launch="backend", data=True, tensor=True)
SHARDS = Parallel(tensor=2)
PLAN = plan_processes(BACKEND_LAUNCH, SHARDS, Lease(devices=("cpu", "cpu")), [0, 1], 1)
MODEL = ModelSource(kind="directory", location="/m")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendSpec:
    (tmp_path / "starting_backend.py").write_text(BACKEND_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return BackendSpec("starting", "starting_backend:StartingBackend", (), "", BACKEND_LAUNCH)


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(60.0, "spawn", "module")
    yield pool
    pool.close()


def test_one_process_sees_all_devices_of_its_model() -> None:
    lease = Lease(devices=("GPU-b", "GPU-a"))
    plan = plan_processes(BACKEND_LAUNCH, SHARDS, lease, [0, 1, 2, 3])
    (rank,) = plan.ranks
    assert (plan.launch, rank.devices, rank.world_size) == ("backend", ("GPU-b", "GPU-a"), 1)
    assert rank.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_started_processes_are_recorded(pool: RankPool, spec: BackendSpec) -> None:
    group, info = pool.get_loaded(PLAN, Load(spec, MODEL, {"starts": 2}))
    assert info.version == "('cpu',)"
    parents = {psutil.Process(pid).ppid() for pid in group.ranks[0].workers}
    assert (len(group.ranks[0].workers), parents) == (2, {group.ranks[0].pid})
    assert len(group.ranks[0].worker_coordinates) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": 1}, r"planned 2 processes of the backend, tensor 2 by pipeline 1; found 1 processes"),
        ({"starts": 2, "world": 1}, r"found 2 processes \(pid \d+, \d+\), numbers 0, 1 in a world of \[1\]"),
    ],
)
def test_processes_that_differ_from_the_plan_are_refused(
    pool: RankPool, spec: BackendSpec, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerPlacementError, match=message):
        pool.get_loaded(PLAN, Load(spec, MODEL, options))
