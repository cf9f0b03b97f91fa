# SPDX-License-Identifier: Apache-2.0
"""Which replica, stage and shard a rank holds: recorded as torch and the backends number them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pytest_llenergy.backends.base import BackendWorker, Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, check_backend_workers, check_placement, plan_processes
from pytest_llenergy.record.record import Parallel, Record
from pytest_llenergy.report.html.tables import settings_of

from .groups import run

pytest.importorskip("torch")

ROW = Capabilities(framework="torch", process_group=True, data=True, tensor=True, pipeline=True)
ORDER = ("data", "pipeline", "tensor")


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    host = LocalHost("forkserver")
    yield host
    host.close()


def place_in_mesh(degrees: dict[str, int]) -> dict[str, int]:
    """Return where torch puts this rank in a mesh of these degrees, the outermost first."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    return {name: mesh.get_local_rank(name) for name in degrees}


@pytest.mark.slow
def test_ranks_have_the_coordinates_of_torch(host: LocalHost) -> None:
    """With gloo: torch's own mesh of the process group that the plugin made."""
    degrees = Parallel(pipeline=2, tensor=2)
    plan = plan_processes(ROW, degrees, Lease(devices=("cpu",) * 4), [0, 1], 1)
    ranks = RankGroup(plan, {LOCALHOST: host})
    try:
        found = run(ranks, place_in_mesh, {name: getattr(degrees, name) for name in ORDER})
        assert [msgspec.to_builtins(rank.coordinates) for rank in ranks.ranks] == found
        assert len({tuple(each.values()) for each in found}) == 4
        record = Record(id="a", attempt=1, status="measured", parallel=degrees, ranks=list(ranks.ranks))
        facts = settings_of(record)
    finally:
        ranks.close()
    expected = {1: {"pipeline": 0, "tensor": 1}, 2: {"pipeline": 1, "tensor": 0}}
    for rank, place in expected.items():
        found_facts = {name: facts[f"rank {rank} coordinates {name}"] for name in place}
        assert found_facts == {name: str(number) for name, number in place.items()}


def test_processes_of_a_backend_have_coordinates() -> None:
    """As vLLM numbers them: the shards of a stage are consecutive."""
    row = Capabilities(launch="backend", data=True, tensor=True, pipeline=True)
    degrees = Parallel(data=2, tensor=2, pipeline=2)
    plan = plan_processes(row, degrees, Lease(devices=("cpu",) * 8), [0], 1)
    facts = [{"pid": n, "devices": ["cpu"], "threads": 1, "cpus": [0], "world_size": 2} for n in (1, 2)]
    ranks = check_placement(plan, facts)
    assert {rank.coordinates for rank in ranks} == {None}
    workers = [
        [
            BackendWorker(pid=100 + 10 * replica + number, rank=number, world_size=4, attached=True)
            for number in (3, 1, 0, 2)
        ]
        for replica in range(2)
    ]
    ranks = check_backend_workers(plan, ranks, workers)
    assert [rank.workers for rank in ranks] == [[100, 101, 102, 103], [110, 111, 112, 113]]
    places = [(each.data, each.pipeline, each.tensor) for rank in ranks for each in rank.worker_coordinates]
    assert places == [(d, p, t) for d in range(2) for p in range(2) for t in range(2)]
