# SPDX-License-Identifier: Apache-2.0
"""The process plan: how many ranks, and the devices, cores and environment of each; checks of started ranks.

``plan_on_hosts`` makes the plan; all other code only reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pytest_llenergy.backends.base import DEGREES, BackendWorker, Capabilities
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.devices.visibility import HIP, ROCR, VISIBLE_DEVICES, visible_variables
from pytest_llenergy.errors import PlanError, WorkerPlacementError
from pytest_llenergy.record.record import LOCALHOST as LOCALHOST
from pytest_llenergy.record.record import Coordinates, Parallel, RankInfo

#: Variables from which libraries take their number of threads on import.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: The network interface between ranks of one host, and the variables that name it.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

#: Variables that torchrun, Slurm, MPI and ``accelerate launch`` set, and pytest for each phase of a test. A
#: rank that inherits them joins the wrong group, uses another device than planned, or does not serve the next
#: test.
STALE_PREFIXES = (
    *("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("ACCELERATE_USE_", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY", "PYTEST_CURRENT_TEST"),
)

#: Variables that no library reads on import, and that differ between ranks which one process may fork.
PER_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", VISIBLE_DEVICES, HIP, ROCR)


@dataclass(frozen=True)
class RankPlan:
    """One rank, the devices that it sees, and the logical CPUs that it is pinned to, if any."""

    host: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    devices: tuple[str, ...]
    threads: int
    cpus: tuple[int, ...]

    @property
    def device(self) -> str:
        """The devices of the rank, as messages and records show them."""
        return ",".join(self.devices)

    @property
    def name(self) -> str:
        """Its number, and its host if that is not pytest's, as messages show them."""
        host = "" if self.host == LOCALHOST else f" on {self.host}"
        return f"rank {self.rank} of {self.world_size}{host}"

    def environment(self) -> dict[str, str]:
        """Return the variables that the rank sets before anything else can be imported."""
        on_cpu = self.devices == (CPU,)
        return {
            **visible_variables(() if on_cpu else self.devices),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            **(dict.fromkeys(INTERFACES, LOOPBACK) if self.local_world_size == self.world_size else {}),
            "TOKENIZERS_PARALLELISM": "false",
            **({"ACCELERATE_USE_CPU": "true"} if on_cpu else {}),
            **dict.fromkeys(THREAD_VARIABLES, str(self.threads)),
        }


@dataclass(frozen=True)
class ProcessPlan:
    """All ranks of a group. Tests with equal plans can share their ranks."""

    #: One process a device, or one for backends that start their own processes.
    launch: Literal["ranks", "backend"]
    #: Imported by each rank before anything else.
    framework: Literal["torch"] | None
    #: The degrees, which multiply to the number of devices; all 1 if the backend is opaque.
    parallel: Parallel
    ranks: tuple[RankPlan, ...]
    #: UUIDs of the boards of leased MIG instances.
    divided: tuple[str, ...] = ()
    #: How many consecutive ranks work on the same inputs, as the shards of one model do. With
    #: ``launch="backend"`` the first of them does, and the others hold the parts of their hosts.
    replica_size: int = 1
    #: Whether ranks join a process group of the framework.
    process_group: bool = False
    #: Interpreter of the ranks, None for pytest's own. Only with that one ranks can be forks.
    python: str | None = None
    #: Modules that the process which forks the ranks imports.
    preload: tuple[str, ...] = field(default=(), compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of its ranks, that of rank 0 first."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def nodes(self) -> int:
        """Over how many hosts the backend spreads one model, each with one rank."""
        return self.replica_size if self.launch == "backend" else 1


def explain_degree_mismatch(degrees: Parallel, devices: int) -> str | None:
    """Return a message if the degrees do not multiply to the number of devices, else ``None``."""
    product = degrees.data * degrees.tensor * degrees.pipeline * degrees.placement
    if product == devices:
        return None
    above = [f"{kind}={getattr(degrees, kind)}" for kind in DEGREES if getattr(degrees, kind) > 1]
    given = ", ".join(above or ["data=1"])
    return (
        f"parallel({given}) needs {product} devices and the lease has {devices}; make gpus(n) their product: "
        f"@pytest.mark.gpus({product})"
    )


@dataclass(frozen=True)
class HostDevices:
    """What a test holds on one host: its devices, and the logical CPUs that ranks on the CPU share."""

    host: str
    lease: Lease
    cpus: Sequence[int]


def plan_processes(
    capabilities: Capabilities,
    parallel: Parallel | None,
    lease: Lease,
    cpus: Sequence[int],
    threads: int | None = None,
    python: str | None = None,
) -> ProcessPlan:
    """Plan the ranks of a test on pytest's own host; see ``plan_on_hosts``."""
    return plan_on_hosts(capabilities, parallel, [HostDevices(LOCALHOST, lease, cpus)], threads, python)


def plan_on_hosts(
    capabilities: Capabilities,
    parallel: Parallel | None,
    hosts: Sequence[HostDevices],
    threads: int | None = None,
    python: str | None = None,
) -> ProcessPlan:
    """Plan one rank a leased device, or one for all devices if the backend starts its own processes.

    Consecutive ranks are on one host. Raises ``PlanError`` if devices, degrees and backend do not fit.
    """
    devices = [device for each in hosts for device in each.lease.devices]
    n = len(devices)
    if parallel is not None and (wrong := explain_degree_mismatch(parallel, n)) is not None:
        raise PlanError(wrong)
    degrees = capabilities.choose_degrees(parallel, n)
    if lacking := capabilities.unsupported_degrees(degrees):
        hint = "" if parallel else f"; with {n} devices and no mark parallel(...) a test is data parallel"
        raise PlanError(f"no {' and no '.join(lacking)} parallelism is offered here{hint}")
    if degrees.placement > 1 and devices[0] == CPU:
        raise PlanError(
            f"placement={degrees.placement} spreads layers over GPUs; there is one CPU, which holds them all"
        )
    launch, framework, size = capabilities.launch, capabilities.framework, degrees.tensor * degrees.pipeline
    nodes = 1 if launch == "ranks" or capabilities.hosts == "one" else _count_nodes(size, hosts)
    # The devices of one process; all of them if the backend is opaque.
    seen = n if capabilities.opaque else degrees.placement * (size if launch == "backend" else 1)
    groups = [_device_groups(seen // nodes, each) for each in hosts]
    world_size = sum(map(len, groups))
    ranks: list[RankPlan] = []
    for each, on_host in zip(hosts, groups, strict=True):
        share = max(1, len(each.cpus) // len(on_host))
        for local_rank, own in enumerate(on_host):
            cpus = tuple(each.cpus[(local_rank * share + i) % len(each.cpus)] for i in range(share))
            ranks.append(
                RankPlan(
                    host=each.host,
                    rank=len(ranks),
                    local_rank=local_rank,
                    world_size=world_size,
                    local_world_size=len(on_host),
                    devices=own,
                    threads=threads or share,
                    # Ranks on GPUs are not pinned: which cores are near a board is not known here.
                    cpus=cpus if own == (CPU,) else (),
                )
            )
    return ProcessPlan(
        launch=launch,
        framework=framework,
        parallel=degrees,
        ranks=tuple(ranks),
        divided=tuple(board for each in hosts for board in each.lease.divided),
        replica_size=size if launch == "ranks" else nodes,
        process_group=framework is not None and (world_size > 1 or capabilities.process_group),
        python=python,
        preload=() if python else (*([framework] if framework else []), *capabilities.preload),
    )


def _count_nodes(size: int, hosts: Sequence[HostDevices]) -> int:
    """Return over how many hosts a backend spreads a model on ``size`` devices, in equal parts."""
    counts = {len(each.lease.devices) for each in hosts}
    if size <= min(counts):
        return 1
    if len(counts) > 1 or size % min(counts):
        listed = " and ".join(map(str, sorted(counts)))
        raise PlanError(
            f"one model needs {size} devices, and hosts with {listed} each cannot have equal parts of it: "
            "use gpus(..., per_host=n) with a divisor n"
        )
    return size // min(counts)


def _device_groups(size: int, hold: HostDevices) -> list[tuple[str, ...]]:
    """Return the devices of each rank of a host, each of which sees ``size`` devices."""
    devices = hold.lease.devices
    if hold.lease.divided and size > 1:
        # CUDA enumerates one MIG instance in a process (MIG User Guide, "CUDA Device Enumeration").
        raise PlanError(
            f"one process sees one MIG instance and the lease has {len(devices)} for a backend that "
            "runs in one; use gpus(1), or a backend that runs one rank on each"
        )
    if len(devices) % size:
        raise PlanError(
            f"one process needs {size} devices and host {hold.host} has {len(devices)}: a process cannot use "
            "devices of several hosts; lower the degrees, or let per_host be a multiple of them"
        )
    # There is one CPU, however many ranks share it.
    return [tuple(dict.fromkeys(devices[start : start + size])) for start in range(0, len(devices), size)]


def check_placement(plan: ProcessPlan, reported: Sequence[Mapping[str, Any]]) -> tuple[RankInfo, ...]:
    """Return the ranks for the record, from the facts that each rank reports (see ``rank.set_up``).

    Raises ``WorkerPlacementError`` if a process, device or world differs from the plan.
    """
    pids = {(rank.host, facts["pid"]) for rank, facts in zip(plan.ranks, reported, strict=True)}
    if len(pids) != len(plan.ranks):
        raise WorkerPlacementError(f"planned {len(plan.ranks)} processes, found {len(pids)}")
    ranks = []
    for planned, facts in zip(plan.ranks, reported, strict=True):
        device, world_size = ",".join(facts["devices"]), facts["world_size"]
        where = f"rank {planned.rank}: planned"
        if device != planned.device:
            raise WorkerPlacementError(f"{where} on {planned.device}, found on {device}")
        if plan.framework == "torch" and world_size != planned.world_size:
            raise WorkerPlacementError(
                f"{where} in a world of {planned.world_size}, found in one of {world_size}"
            )
        ranks.append(
            RankInfo(
                rank=planned.rank,
                local_rank=planned.local_rank,
                pid=facts["pid"],
                device=device,
                threads=facts["threads"],
                cpus=facts["cpus"],
                host=planned.host,
                coordinates=_locate(plan.parallel, planned.rank) if plan.launch == "ranks" else None,
            )
        )
    return tuple(ranks)


def check_backend_workers(
    plan: ProcessPlan, ranks: Sequence[RankInfo], workers: Sequence[Sequence[BackendWorker]]
) -> tuple[RankInfo, ...]:
    """Return the ranks for the record, with the processes that the backend of each has started.

    Raises ``WorkerPlacementError`` if their number or their world differs from the plan.
    """
    if plan.launch != "backend":
        return tuple(ranks)
    return tuple(_check_workers(plan, rank, found) for rank, found in zip(ranks, workers, strict=True))


def _check_workers(plan: ProcessPlan, rank: RankInfo, workers: Sequence[BackendWorker]) -> RankInfo:
    degrees, nodes = plan.parallel, plan.nodes
    size = degrees.tensor * degrees.pipeline
    replica, node_rank = divmod(rank.rank, nodes)
    here = range(node_rank * size // nodes, (node_rank + 1) * size // nodes)
    ordered = sorted(workers, key=lambda worker: worker.rank)
    pids = [worker.pid for worker in ordered]
    numbers = [worker.rank for worker in ordered]
    worlds = sorted({worker.world_size for worker in ordered})
    misplaced = nodes > 1 and not set(numbers).issubset(here)
    if len(set(pids)) != len(here) or worlds != [size] or misplaced:
        raise WorkerPlacementError(
            f"rank {rank.rank}: planned {len(here)} processes of the backend, tensor {degrees.tensor} by "
            f"pipeline {degrees.pipeline}; found {len(set(pids))} processes (pid "
            f"{', '.join(map(str, pids))}), numbers {', '.join(map(str, numbers))} in a world of {worlds}"
        )
    known = [worker for worker in ordered if worker.pid]
    return msgspec.structs.replace(
        rank,
        workers=[worker.pid for worker in known],
        worker_coordinates=[_locate(degrees, replica * size + worker.rank) for worker in known],
    )


def _locate(degrees: Parallel, rank: int) -> Coordinates:
    """Return the part of the work of a rank: the shards of a stage, then the stages, are consecutive.

    torch numbers the ranks of a mesh (data, pipeline, tensor) in this way, and so do backends.
    """
    within, tensor = divmod(rank, degrees.tensor)
    data, pipeline = divmod(within, degrees.pipeline)
    return Coordinates(data, tensor, pipeline)


def inherited_environment() -> dict[str, str]:
    """Return what ranks inherit of pytest's environment; the plan adds its own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith(STALE_PREFIXES)}
