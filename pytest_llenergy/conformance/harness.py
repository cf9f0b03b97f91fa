# SPDX-License-Identifier: Apache-2.0
"""Run a backend in real ranks, as tests do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import ProcessPlan, plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.workload import call_workload, task_workload
from pytest_llenergy.record.record import BackendInfo, Parallel
from pytest_llenergy.record.timeline import RequestTimeline, Timeline


@dataclass(frozen=True)
class BatchResult:
    """Outputs and timestamps of one batch."""

    generation: Generation
    timeline: Timeline

    @property
    def token_ids(self) -> list[list[int]]:
        """The output tokens of each prompt; code points of its text if a server reports no tokens."""
        if self.has_token_ids:
            return self.generation.token_ids
        return [list(map(ord, text)) for text in self.generation.texts]

    @property
    def has_token_ids(self) -> bool:
        """Whether the backend reports the tokens themselves."""
        return all(self.generation.token_ids)

    @property
    def requests(self) -> Sequence[RequestTimeline]:
        """Counts and times of each prompt."""
        return self.generation.requests


@dataclass(frozen=True)
class LoadedBackend:
    """A backend with a model, in ranks of ``pool`` that start with the first batch.

    It uses the first devices of ``lease`` if these are GPUs, or the CPU for any number of ranks.
    """

    spec: BackendSpec
    model: ModelSource
    options: Mapping[str, Any]
    lease: Lease
    pool: RankPool
    threads: int
    timeout_s: float

    def devices(self, n: int) -> Lease | None:
        """Return a lease of the first ``n`` devices; ``None`` if there are fewer."""
        if not self.lease.uuids:
            return Lease(devices=(CPU,) * n)
        if len(self.lease.devices) < n:
            return None
        return replace(
            self.lease,
            devices=self.lease.devices[:n],
            boards=self.lease.boards[:n],
            indices=self.lease.indices[:n],
            choices=(),
        )

    def plan(self, degrees: Parallel | None = None) -> ProcessPlan:
        """Plan the ranks for these degrees, by default for one device.

        Raises:
            PlanError: If the backend or the devices do not allow them.
        """
        requested = degrees or Parallel()
        lease = self.devices(requested.data * requested.tensor * requested.pipeline * requested.placement)
        assert lease is not None
        return plan_processes(
            self.spec.capabilities, requested, lease, usable_cpus(), self.threads, self.spec.python
        )

    def load(self, degrees: Parallel | None = None) -> tuple[RankGroup, BackendInfo]:
        """Return ranks with the loaded model.

        Raises:
            LLEnergyError: If a rank does not start or load the model.
        """
        return self.pool.get_loaded(
            self.plan(degrees), Load.from_options(self.spec, self.model, self.options)
        )

    def generate(
        self, prompts: Sequence[str], *, degrees: Parallel | None = None, **params: Any
    ) -> BatchResult:
        """Run one batch.

        Raises:
            BackendError: If a rank fails.
            WorkerError: If a rank fails.
        """
        group, _ = self.load(degrees)
        workload = task_workload(group, prompts, GenerationParams.parse(params), self.timeout_s)
        timeline = workload.run_round()
        return BatchResult(Generation.merge(workload.results()), timeline)

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function in a rank without a model, with the arguments for loading the backend."""
        workload = call_workload(
            self.pool.get_ranks(self.plan()),
            function,
            (),
            {
                **Load.from_options(self.spec, self.model, self.options).payload(),
                "devices": self.plan().ranks[0].devices,
                "threads": self.threads,
                **arguments,
            },
            self.timeout_s,
        )
        workload.run_round()
        return workload.results()[0]
