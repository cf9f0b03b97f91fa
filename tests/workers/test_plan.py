# SPDX-License-Identifier: Apache-2.0
"""The process plan: ranks, their devices, cores and environment."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.workload import split_prompts

from .groups import (
    TORCH,
    plan,
)


class TestPlan:
    def test_degrees_must_multiply_to_the_devices(self) -> None:
        lease = Lease(devices=("cpu", "cpu"))
        with pytest.raises(
            PlanError, match=r"needs 4 devices and the lease has 2; make gpus\(n\) their product"
        ):
            plan_processes(TORCH, Parallel(data=2, tensor=2), lease, [0, 1])

    def test_cores_and_threads_are_divided_between_ranks(self) -> None:
        lease = Lease(devices=("cpu", "cpu"))
        ranks = plan_processes(TORCH, None, lease, [0, 1, 2, 3]).ranks
        assert [(rank.cpus, rank.threads) for rank in ranks] == [((0, 1), 2), ((2, 3), 2)]

    def test_more_ranks_than_cores_take_turns(self) -> None:
        lease = Lease(devices=("cpu",) * 3)
        ranks = plan_processes(TORCH, None, lease, [0, 1]).ranks
        assert [(rank.cpus, rank.threads) for rank in ranks] == [((0,), 1), ((1,), 1), ((0,), 1)]

    def test_a_gpu_rank_sees_its_board_by_uuid_and_nothing_else(self) -> None:
        lease = Lease(devices=("GPU-b", "GPU-a"))
        ranks = plan_processes(TORCH, None, lease, [0, 1]).ranks
        visible = [rank.environment()["CUDA_VISIBLE_DEVICES"] for rank in ranks]
        assert visible == ["GPU-b", "GPU-a"]
        assert {rank.environment()["CUDA_DEVICE_ORDER"] for rank in ranks} == {"PCI_BUS_ID"}
        assert [rank.local_rank for rank in ranks] == [0, 1]

    def test_a_cpu_rank_sees_no_board(self) -> None:
        assert plan(1).ranks[0].environment()["CUDA_VISIBLE_DEVICES"] == ""

    def test_prompts_are_split_as_accelerate_does(self) -> None:
        assert split_prompts(list("abcdefg"), 2) == [list("abcd"), list("efg")]
        assert split_prompts(list("abc"), 3) == [["a"], ["b"], ["c"]]
