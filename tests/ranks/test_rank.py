# SPDX-License-Identifier: Apache-2.0
"""Real spawned ranks: they are as planned, see only their devices, and use no CPU outside the work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import WorkerError, WorkerPlacementError
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import Host
from pytest_llenergy.ranks.plan import check_placement, plan_processes
from pytest_llenergy.ranks.workload import call_workload

from .groups import (
    TORCH,
    plan,
    run,
)


class TestEntry:
    def test_what_launchers_have_set_does_not_reach_a_rank(
        self, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stale = {
            "OMP_NUM_THREADS": "64",
            "TORCHELASTIC_RUN_ID": "stale",
            "SLURM_PROCID": "7",
            "ACCELERATE_TORCH_DEVICE": "cuda:3",
            # Nothing of a launcher's, for all their names.
            "ROLE_ARN": "arn:aws:iam::1:role/tests",
            "GROUP_ID": "1000",
        }
        for name, value in stale.items():
            monkeypatch.setenv(name, value)
        names = list(stale)
        ranks = RankGroup(plan(1), hosts)
        try:
            (found,) = run(ranks, lambda: [os.environ.get(name) for name in names])
        finally:
            ranks.close()
        assert found == ["1", None, None, None, "arn:aws:iam::1:role/tests", "1000"]

    def test_torch_imported_too_early_is_refused(
        self, hosts: dict[str, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(WorkerError, match="torch was imported before the rank could set its devices"):
            RankGroup(plan(1), hosts)

    def test_a_gpu_that_torch_does_not_see_is_an_error_not_a_cpu_run(self, hosts: dict[str, Host]) -> None:
        """V1: the plan says GPU, torch has none; nothing may run on the CPU instead."""
        gpu = plan_processes(TORCH, None, Lease(devices=("GPU-0123",)), [0], 1)
        with pytest.raises(WorkerError, match="the plan gives this rank GPU-0123, torch sees 0 GPUs"):
            RankGroup(gpu, hosts)

    def test_a_group_that_is_not_the_planned_one_is_refused(self) -> None:
        two = plan(2, TORCH)
        facts = [{"pid": pid, "devices": ["cpu"], "world_size": 1} for pid in (1, 2)]
        with pytest.raises(WorkerPlacementError, match="rank 0: planned in a world of 2, found in one of 1"):
            check_placement(two, facts)
        with pytest.raises(WorkerPlacementError, match="planned 2 processes, found 1"):
            check_placement(two, [facts[0], facts[0]])
        swapped = plan_processes(TORCH, None, Lease(devices=("GPU-a", "GPU-b")), [0], 1)
        facts = [{"pid": 1, "devices": ["GPU-b"], "world_size": 2}, {"pid": 2, "devices": ["GPU-a"]}]
        with pytest.raises(WorkerPlacementError, match="rank 0: planned on GPU-a, found on GPU-b"):
            check_placement(swapped, facts)


def test_pytest_uses_no_cpu_while_ranks_work(pair: RankGroup) -> None:
    workload = call_workload(pair, time.sleep, (1.0,), {}, 60)
    before = time.process_time()
    workload.run_round()
    # A busy wait would take most of the second.
    assert time.process_time() - before < 0.2


def test_ranks_use_no_cpu_before_and_after_the_work(pair: RankGroup) -> None:
    """What they did there would be measured as idle power."""

    def cpu_s() -> float:
        return sum(sum(psutil.Process(rank.pid).cpu_times()[:2]) for rank in pair.ranks)

    garbage = "import gc; made = [[[] for _ in range(1000)] for _ in range(3000)]; made.append(made)"
    workload = call_workload(pair, exec, (garbage,), {}, 60)
    workload.prepare_round()
    before = cpu_s()
    time.sleep(0.3)
    gap_before = cpu_s() - before
    workload.work()
    after = cpu_s()
    time.sleep(0.3)
    gap_after = cpu_s() - after
    # Collecting that garbage would take a good part of what making it takes.
    assert gap_before + gap_after < 0.2 * (after - before - gap_before)
    workload.timeline()


def test_the_window_runs_from_the_first_start_to_the_last_end(pair: RankGroup) -> None:
    def work() -> tuple[int, int]:
        import time

        began_ns = time.monotonic_ns()
        time.sleep(1.5 if os.environ["RANK"] == "1" else 0.1)
        return began_ns, time.monotonic_ns()

    workload = call_workload(pair, work, (), {}, 60)
    before_ns = time.monotonic_ns()
    timeline = workload.run_round()
    after_ns = time.monotonic_ns()
    results = workload.results()
    marks = [rank.iterations[-1] for rank in timeline.ranks]
    for mark, (began_ns, ended_ns) in zip(marks, results, strict=True):
        assert before_ns < mark.start_ns <= began_ns < ended_ns <= mark.end_ns < after_ns
    assert timeline.start_ns == min(mark.start_ns for mark in marks)
    assert timeline.end_ns == max(mark.end_ns for mark in marks)
    # Nothing but the call is in a rank's own window, and the shorter one does not wait in it for the longer.
    assert marks[0].end_ns - results[0][1] < results[1][1] - results[1][0]
    assert workload.peak_memory_bytes is not None
    assert workload.peak_memory_bytes > 10_000_000
