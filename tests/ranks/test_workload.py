# SPDX-License-Identifier: Apache-2.0
"""What ranks report besides their timeline: their peak memory, and the operations of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.plan import plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.workload import call_workload, task_workload
from pytest_llenergy.record.record import Parallel
from pytest_llenergy.record.timeline import Flops

from .groups import plan

MIB = 1 << 20

#: Importable in the ranks, which have the search path of this process. Each rank has a part of each of the
#: first five tokens' hundred operations, or tells those of all ranks.
COUNTED = """
from pytest_llenergy.backends.tasks import Generation
from pytest_llenergy.record.timeline import Flops
from pytest_llenergy.record.record import BackendInfo
from pytest_llenergy.record.timeline import RequestTimeline

class Job:
    def __init__(self, prompts):
        self.prompts = prompts
    def run(self):
        return None
    def result(self, outcome):
        requests = [RequestTimeline(input_tokens=len(each), output_tokens=5) for each in self.prompts]
        return Generation(texts=self.prompts, token_ids=[], requests=requests)

class Plain:
    def load(self, model, options, context):
        self.context = context
        return BackendInfo(name="counted", version="1", model=model.label)
    def prepare(self, prompts, params):
        return Job(prompts)
    def synchronize(self): pass
    def close(self): pass

class Shards(Plain):
    def flops(self, job, done):
        return Flops(count=100 * len(done.requests) // self.context.parallel.tensor, source="counted")

class Whole(Plain):
    def flops(self, job, done):
        return Flops(count=100 * len(done.requests), source="analytic", shared=True)
"""


def count_flops(name: str, prompts: list[str], parallel: Parallel) -> Flops:
    """Return the operations that four ranks report for a batch."""
    row = Capabilities(data=True, tensor=True)
    spec = BackendSpec("counted", f"counted:{name}", (), "", row)
    pool = RankPool(60.0, "spawn", "module")
    try:
        ranks = plan_processes(row, parallel, Lease(devices=("cpu",) * 4), [0, 1], 1)
        group, _ = pool.get_loaded(ranks, Load(spec, ModelSource("directory", "/a"), {}))
        workload = task_workload(group, prompts, GenerationParams(), 60)
        workload.run_round()
        return workload.flops()
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["Shards", "Whole"])
def test_the_operations_of_shards_are_counted_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts over two replicas of two shards: 2 · 100 and 1 · 100, reported by whichever ranks."""
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    flops = count_flops(name, ["a", "b", "c"], Parallel(data=2, tensor=2))
    assert flops == Flops(count=300, source={"Shards": "counted", "Whole": "analytic"}[name])


def test_each_rank_has_its_own_peak_memory(hosts: dict[str, Host]) -> None:
    """Rank 0 touches 16 MiB, rank 1 touches 16 MiB and 48 more: that is what they differ by."""
    ranks = RankGroup(plan(2), hosts)

    def touch(megabytes: list[int]) -> int:
        import os

        return len(bytearray(b"x") * (megabytes[int(os.environ["RANK"])] * 1024 * 1024))

    try:
        workload = call_workload(ranks, touch, ([16, 16],), {}, 60)
        workload.run_round()
        alike = list(workload.rank_peak_memory_bytes)
        workload = call_workload(ranks, touch, ([16, 64],), {}, 60)
        workload.run_round()
        first, second = workload.rank_peak_memory_bytes
        assert workload.results() == [16 * MIB, 64 * MIB]
    finally:
        ranks.close()
    assert alike[0] is not None
    assert alike[1] is not None
    assert first is not None
    assert second is not None
    more = (second - first) - (alike[1] - alike[0])
    assert abs(more - 48 * MIB) < 4 * MIB
    assert workload.peak_memory_bytes == first + second
