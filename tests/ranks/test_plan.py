# SPDX-License-Identifier: Apache-2.0
"""The process plan: ranks, their devices, cores and environment."""

from __future__ import annotations

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import PlanError
from pytest_llenergy.ranks.plan import HostDevices, plan_on_hosts, plan_processes
from pytest_llenergy.record.record import Parallel

from .groups import TORCH


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

    def test_an_opaque_backend_has_one_rank_with_all_boards_and_no_degrees(self) -> None:
        opaque = Capabilities(launch="backend", opaque=True, gpu=True)
        plan = plan_processes(opaque, None, Lease(devices=("GPU-a", "GPU-b", "GPU-c")), [0, 1])
        assert plan.parallel == Parallel()
        (rank,) = plan.ranks
        assert rank.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b,GPU-c"
        (rank,) = plan_processes(opaque, None, Lease(devices=("cpu", "cpu")), [0, 1]).ranks
        assert (rank.devices, rank.threads) == (("cpu",), 2)
        with pytest.raises(PlanError, match="one process sees one MIG instance and the lease has 2"):
            plan_processes(opaque, None, Lease(devices=("MIG-a", "MIG-b"), divided=("GPU-a",)), [0, 1])
        with pytest.raises(PlanError, match="one process needs 8 devices and host n1 has 4"):
            plan_on_hosts(opaque, None, hold("n1", "n2"))


def hold(*hosts: str, each: int = 4) -> list[HostDevices]:
    """Hold GPUs on each of these hosts."""
    return [
        HostDevices(host, Lease(devices=tuple(f"GPU-{host}{number}" for number in range(each))), [0, 1])
        for host in hosts
    ]


class TestSeveralHosts:
    def test_ranks_are_numbered_host_by_host(self) -> None:
        plan = plan_on_hosts(TORCH, None, hold("n1", "n2", each=2))
        seen = [(rank.host, rank.rank, rank.local_rank, rank.local_world_size) for rank in plan.ranks]
        assert seen == [("n1", 0, 0, 2), ("n1", 1, 1, 2), ("n2", 2, 0, 2), ("n2", 3, 1, 2)]
        assert [rank.device for rank in plan.ranks] == ["GPU-n10", "GPU-n11", "GPU-n20", "GPU-n21"]
        environment = plan.ranks[2].environment()
        assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
            *"2042"
        ]
        assert "GLOO_SOCKET_IFNAME" not in environment
        assert plan.hosts == ("n1", "n2")
        assert plan.process_group

    def test_one_host_elsewhere_uses_its_loopback_interface(self) -> None:
        plan = plan_on_hosts(TORCH, None, hold("n2", each=2))
        assert {rank.environment()["GLOO_SOCKET_IFNAME"] for rank in plan.ranks} == {"lo"}

    def test_cpus_are_those_of_each_host(self) -> None:
        cpus = Lease(devices=("cpu", "cpu"))
        plan = plan_on_hosts(
            TORCH, None, [HostDevices("n1", cpus, [0, 1, 2, 3]), HostDevices("n2", cpus, [6, 7])]
        )
        assert [rank.cpus for rank in plan.ranks] == [(0, 1), (2, 3), (6,), (7,)]
        assert [rank.threads for rank in plan.ranks] == [2, 2, 1, 1]

    def test_a_backend_that_is_launched_on_each_host_spreads_a_model(self) -> None:
        row = Capabilities(data=True, tensor=True, pipeline=True, launch="backend", hosts="several")
        plan = plan_on_hosts(row, Parallel(tensor=4, pipeline=2, data=2), hold("n1", "n2", "n3", "n4"))
        assert [(rank.host, rank.rank, len(rank.devices)) for rank in plan.ranks] == [
            *(("n1", 0, 4), ("n2", 1, 4), ("n3", 2, 4), ("n4", 3, 4))
        ]
        assert (plan.nodes, plan.replica_size) == (2, 2)
        hosts = hold("n1", "n2")
        assert plan_on_hosts(row, Parallel(tensor=8), hosts).nodes == 2
        uneven = [*hold("n1", each=4), *hold("n2", each=2)]
        with pytest.raises(
            PlanError, match=r"^one model needs 6 devices, and hosts with 2 and 4 each cannot"
        ):
            plan_on_hosts(row, Parallel(tensor=2, pipeline=3), uneven)

    @pytest.mark.parametrize("row", ["placement", "backend"])
    def test_a_process_has_devices_of_one_host(self, row: str) -> None:
        rows = {
            "placement": Capabilities(data=True, placement=True, framework="torch"),
            "backend": Capabilities(tensor=True, launch="backend"),
        }
        degrees = Parallel(placement=8) if row == "placement" else Parallel(tensor=8)
        with pytest.raises(PlanError, match=r"one process needs 8 devices and host n1 has 4: .*per_host"):
            plan_on_hosts(rows[row], degrees, hold("n1", "n2"))
