# SPDX-License-Identifier: Apache-2.0
"""The process plan: ranks, their devices, cores and environment, and checks against it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from pytest_llenergy.backends.base import DEGREES, BackendWorker, Capabilities
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.errors import PlanError, WorkerPlacementError
from pytest_llenergy.model.record import Parallel, RankInfo

# The process plan: how many ranks, which device and cores each has, and the environment it lives in.
#
# Made by one function; everything else reads it.

#: Libraries that decide their thread count from the environment when they are imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: Between ranks of one host; other interfaces would only add names to look up and fail on.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

#: What torchrun, Slurm, MPI and ``accelerate launch`` leave behind; a rank that inherits it joins the wrong
#: group, or takes another device than it was given.
STALE_PREFIXES = (
    *("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("ACCELERATE_USE_", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY"),
)

#: The host of pytest itself, the only one there is today.
LOCALHOST = "localhost"

#: Variables that differ between the ranks of a group; all others can be there before torch is imported.
PER_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class RankPlan:
    """One process, and the devices that it sees: one, or all where the engine shares them out.

    ``cpus`` are the logical CPUs it is pinned to; empty means not pinned. ``local_rank`` is its position
    among the ``local_world_size`` ranks of its host.
    """

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
        """Its devices, as they are told to people."""
        return ",".join(self.devices)

    @property
    def on_cpu(self) -> bool:
        """Whether it has no GPU."""
        return self.devices == (CPU,)

    def environment(self) -> dict[str, str]:
        """The variables that the rank sets before anything else can be imported."""
        visible = "" if self.on_cpu else self.device
        return {
            "CUDA_VISIBLE_DEVICES": visible,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "HIP_VISIBLE_DEVICES": visible,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            **(dict.fromkeys(INTERFACES, LOOPBACK) if self.local_world_size == self.world_size else {}),
            "TOKENIZERS_PARALLELISM": "false",
            **({"ACCELERATE_USE_CPU": "true"} if self.on_cpu else {}),
            **dict.fromkeys(THREAD_VARIABLES, str(self.threads)),
        }


@dataclass(frozen=True)
class ProcessPlan:
    """All processes of one group. Equal plans can share their processes.

    ``divided`` are the UUIDs of the boards that leased MIG instances are parts of. ``together`` is how many
    consecutive ranks work on the same inputs, such as the shards of one model. ``process_group`` tells
    whether the framework's is there, ``preload`` the modules that forked ranks have in common. ``python`` is
    the interpreter of the ranks, ``None`` for pytest's own; only of that one ranks can be forks.
    """

    launch: Literal["ranks", "engine"]
    framework: Literal["torch"] | None
    parallel: Parallel
    ranks: tuple[RankPlan, ...]
    divided: tuple[str, ...] = ()
    together: int = 1
    process_group: bool = False
    python: str | None = None
    preload: tuple[str, ...] = field(default=(), compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where its ranks are, each host once, that of rank 0 first."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))


def explain_degree_mismatch(degrees: Parallel, devices: int) -> str | None:
    """What is wrong where degrees do not multiply to the number of devices; else ``None``."""
    product = degrees.data * degrees.tensor * degrees.pipeline * degrees.placement
    if product == devices:
        return None
    above = [f"{kind}={getattr(degrees, kind)}" for kind in DEGREES if getattr(degrees, kind) > 1]
    given = ", ".join(above or ["data=1"])
    return (
        f"parallel({given}) needs {product} devices and the lease has {devices}; make gpus(n) their product: "
        f"@pytest.mark.gpus({product})"
    )


def plan_processes(
    capabilities: Capabilities,
    parallel: Parallel | None,
    lease: Lease,
    cpus: Sequence[int],
    threads: int | None = None,
    python: str | None = None,
) -> ProcessPlan:
    """One rank for each leased device, or one for all of an engine; data parallel unless the test says more.

    ``cpus`` are the logical CPUs to share out; ``threads`` overrides the threads of each rank; ``python`` is
    their interpreter where it is another than pytest's. Raises ``PlanError`` when the degrees do not multiply
    to the devices, or are none that the engine offers.
    """
    n = len(lease.devices)
    degrees = parallel or Parallel(data=n)
    if (wrong := explain_degree_mismatch(degrees, n)) is not None:
        raise PlanError(wrong)
    lacking = capabilities.lacks(degrees)
    if lacking:
        said = "" if parallel else f"; with {n} devices and no mark parallel(...) a test is data parallel"
        raise PlanError(f"no {' and no '.join(lacking)} parallelism is offered here{said}")
    if degrees.placement > 1 and lease.devices[0] == CPU:
        raise PlanError(
            f"placement={degrees.placement} spreads layers over GPUs; there is one CPU, which holds them all"
        )
    groups = _device_groups(capabilities, degrees, lease)
    share = max(1, len(cpus) // len(groups))
    ranks: list[RankPlan] = []
    for rank, devices in enumerate(groups):
        own = tuple(cpus[(rank * share + i) % len(cpus)] for i in range(share))
        ranks.append(
            RankPlan(
                host=LOCALHOST,
                rank=rank,
                local_rank=rank,
                world_size=len(groups),
                local_world_size=len(groups),
                devices=devices,
                threads=threads or share,
                # A GPU's rank is not pinned: which cores are near its board is not known here.
                cpus=own if devices == (CPU,) else (),
            )
        )
    framework = capabilities.framework
    return ProcessPlan(
        launch=capabilities.launch,
        framework=framework,
        parallel=degrees,
        ranks=tuple(ranks),
        divided=lease.divided,
        together=degrees.tensor * degrees.pipeline if capabilities.launch == "ranks" else 1,
        process_group=framework is not None and (len(groups) > 1 or capabilities.process_group),
        python=python,
        preload=() if python else (*([framework] if framework else []), *capabilities.preload),
    )


def _device_groups(capabilities: Capabilities, degrees: Parallel, lease: Lease) -> list[tuple[str, ...]]:
    """The devices of each process."""
    size = degrees.placement
    if capabilities.launch == "engine":
        size *= degrees.tensor * degrees.pipeline
        size *= degrees.data if capabilities.replicas == "engine" else 1
    if lease.divided and size > 1:
        # CUDA enumerates one MIG instance in a process (MIG User Guide, "CUDA Device Enumeration").
        raise PlanError(
            f"one process sees one MIG instance and the lease has {len(lease.devices)} for an engine that "
            "runs in one; use gpus(1), or a backend that runs one rank on each"
        )
    devices = lease.devices
    # Of a CPU there is one, however many share it.
    return [tuple(dict.fromkeys(devices[start : start + size])) for start in range(0, len(devices), size)]


# What runs, held against the plan.


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


def check_backend_workers(
    plan: ProcessPlan, ranks: Sequence[RankInfo], workers: Sequence[Sequence[BackendWorker]]
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


def _checked(plan: ProcessPlan, rank: RankInfo, workers: Sequence[BackendWorker]) -> list[int]:
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


# What pytest's own process means for its ranks: the environment they inherit, and what would break them.

#: Told anew for every phase of every test; ranks outlive the test that started them.
PER_TEST_VARIABLES = ("PYTEST_CURRENT_TEST",)


@dataclass(frozen=True)
class Surroundings:
    """What ranks take over from pytest's process when they start."""

    environment: dict[str, str]
    directory: str
    search_path: tuple[str, ...]


def current_surroundings() -> Surroundings:
    """As they are now. A directory that is gone is none."""
    try:
        directory = str(Path.cwd())
    except OSError:
        directory = ""
    return Surroundings(
        inherited_environment(), directory, tuple(path for path in sys.path if isinstance(path, str))
    )


def inherited_environment() -> dict[str, str]:
    """The environment of ranks that are started now, but for what the plan sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in PER_TEST_VARIABLES and not name.startswith(STALE_PREFIXES)
    }


def find_hazards() -> Iterator[str]:
    """What a test file or a plugin has done to this process that users take for a fault of the ranks."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        chosen = multiprocessing.get_start_method(allow_none=True)
        # The platform's own is set by any library that makes a queue or a lock, by no choice of anybody's.
        if chosen not in (None, "spawn", multiprocessing.get_all_start_methods()[0]):
            yield (
                f"multiprocessing's start method was set to {chosen!r} in pytest's process; ranks do not "
                "follow it, they are started as --energy-start-method says"
            )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield (
            "CUDA is initialised in pytest's own process, by a test file or a plugin: it holds memory of a "
            "GPU, and processes forked from it cannot use CUDA; move the call into workers.run"
        )
