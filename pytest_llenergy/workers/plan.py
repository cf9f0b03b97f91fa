# SPDX-License-Identifier: Apache-2.0
"""The process plan: how many ranks, which device and cores each has, and the environment it lives in.

Made by one function; everything else reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.record import Parallel

#: Libraries that decide their thread count from the environment when they are imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: All ranks are on this host; other interfaces would only add names to look up and fail on.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

#: What torchrun, Slurm and MPI leave behind; a rank that inherits it joins the wrong group.
STALE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "GROUP_", "ROLE_", "MASTER_")


@dataclass(frozen=True)
class RankPlan:
    """One process. ``cpus`` are the logical CPUs it is pinned to; empty means not pinned."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    threads: int
    cpus: tuple[int, ...]

    def environment(self) -> dict[str, str]:
        """The variables that the rank sets before anything else can be imported."""
        visible = "" if self.device == CPU else self.device
        return {
            "CUDA_VISIBLE_DEVICES": visible,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "HIP_VISIBLE_DEVICES": visible,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "NCCL_SOCKET_IFNAME": LOOPBACK,
            "TOKENIZERS_PARALLELISM": "false",
            **({"ACCELERATE_USE_CPU": "true"} if self.device == CPU else {}),
            **dict.fromkeys(THREAD_VARIABLES, str(self.threads)),
        }


@dataclass(frozen=True)
class ProcessPlan:
    """All processes of one group. Equal plans can share their processes.

    ``divided`` are the UUIDs of the boards that leased MIG instances are parts of.
    """

    launch: Literal["ranks", "engine"]
    framework: Literal["torch"] | None
    parallel: Parallel
    ranks: tuple[RankPlan, ...]
    divided: tuple[str, ...] = ()


def plan_processes(
    capabilities: Capabilities,
    parallel: Parallel | None,
    lease: Lease,
    cpus: Sequence[int],
    threads: int | None = None,
) -> ProcessPlan:
    """One rank for each leased device, data parallel unless the test says otherwise.

    ``cpus`` are the logical CPUs to share out; ``threads`` overrides the threads of each rank. Raises
    ``PlanError`` when the degrees do not multiply to the devices.
    """
    n = len(lease.devices)
    degrees = parallel or Parallel(data=n)
    product = degrees.data * degrees.tensor * degrees.pipeline
    if product != n:
        raise PlanError(
            f"parallel(data={degrees.data}, tensor={degrees.tensor}, pipeline={degrees.pipeline}) needs "
            f"{product} devices and the lease has {n}; make gpus(n) their product"
        )
    share = max(1, len(cpus) // n)
    ranks: list[RankPlan] = []
    for rank, device in enumerate(lease.devices):
        own = tuple(cpus[(rank * share + i) % len(cpus)] for i in range(share))
        ranks.append(
            RankPlan(
                rank=rank,
                local_rank=rank,
                world_size=n,
                device=device,
                threads=threads or share,
                # A GPU's rank is not pinned: which cores are near its board is not known here.
                cpus=own if device == CPU else (),
            )
        )
    return ProcessPlan(capabilities.launch, capabilities.framework, degrees, tuple(ranks), lease.divided)


def refuse(spec: BackendSpec, parallel: Parallel, able: Sequence[str]) -> str | None:
    """Why a backend cannot run with these degrees, and which could; ``None`` if it can."""
    lacking = spec.capabilities.lacks(parallel)
    if not lacking:
        return None
    others = ", ".join(able) if able else "none here"
    return f"{spec.name} does not offer {' and '.join(lacking)} parallelism; backends that do: {others}"
