# SPDX-License-Identifier: Apache-2.0
"""A backend in real ranks, as tests run it; and what ranks do for the suite: load and close it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_llenergy.backends.base import BackendSpec, RankContext, create_backend
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import Generation, GenerationParams
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.errors import BackendError, ModelError
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import ProcessPlan, plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.usage import BackendProcesses, memory_bytes
from pytest_llenergy.ranks.workload import call_workload, task_workload
from pytest_llenergy.record.record import BackendInfo, Parallel
from pytest_llenergy.record.timeline import Timeline

#: How often a model is loaded to see what stays. A process keeps some memory anyway, whatever the model.
CYCLES = 6


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
        lease = self.lease
        if not lease.uuids:
            return Lease(devices=(CPU,) * n)
        if len(lease.devices) < n:
            return None
        first = {name: getattr(lease, name)[:n] for name in ("devices", "boards", "indices")}
        return replace(lease, **first, choices=())

    def plan(self, degrees: Parallel | None = None) -> ProcessPlan:
        """Plan the ranks for these degrees, by default for one device.

        Raises:
            PlanError: If the backend or the devices do not allow them.
        """
        asked = degrees or Parallel()
        lease = self.devices(asked.data * asked.tensor * asked.pipeline * asked.placement)
        assert lease is not None
        row, python = self.spec.capabilities, self.spec.python
        return plan_processes(row, asked, lease, usable_cpus(), self.threads, python)

    def load(self, degrees: Parallel | None = None) -> tuple[RankGroup, BackendInfo]:
        """Return ranks with the loaded model.

        Raises:
            LLEnergyError: If a rank does not start or load the model.
        """
        load = Load(self.spec, self.model, self.options)
        return self.pool.get_loaded(self.plan(degrees), load)

    def generate(
        self, prompts: Sequence[str], *, degrees: Parallel | None = None, **params: Any
    ) -> BatchResult:
        """Run one batch.

        Raises:
            BackendError: If a rank fails.
            WorkerError: If a rank fails.
        """
        group, _ = self.load(degrees)
        given = GenerationParams.parse({"ignore_eos": True, **params})
        workload = task_workload(group, prompts, given, self.timeout_s)
        timeline = workload.run_round()
        return BatchResult(Generation.merge(workload.results()), timeline)

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function in a rank without a model, with the arguments for loading the backend."""
        load = Load(self.spec, self.model, self.options).payload()
        context = RankContext(devices=self.plan().ranks[0].devices, threads=self.threads)
        given = {**load, "context": context, **arguments}
        workload = call_workload(self.pool.get_ranks(self.plan()), function, (), given, self.timeout_s)
        workload.run_round()
        return workload.results()[0]


@dataclass(frozen=True)
class LoadCycles:
    """Memory of the rank (bytes) with the model and after ``close``, by cycle."""

    loaded: tuple[int, ...]
    closed: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """The exception that loading raised; ``declared`` if it is a ``ModelError`` or a ``BackendError``."""

    kind: str
    message: str
    declared: bool


def load_repeatedly(
    factory: str, model: Mapping[str, Any], options: Mapping[str, Any], context: RankContext, prompt: str
) -> LoadCycles | None:
    """Load, generate and close several times; ``None`` if the system does not report memory.

    Args:
        factory: ``"module:Class"`` of the backend.
        model: Fields of the ``ModelSource``.
        options: Load options.
        context: Devices and threads of the rank.
        prompt: Prompt to generate from.
    """
    params = GenerationParams.parse({"max_new_tokens": 2, "ignore_eos": True})
    loaded: list[int] = []
    closed: list[int] = []
    for _ in range(CYCLES):
        backend = create_backend(factory)
        backend.load(ModelSource(**model), options, context)
        job = backend.prepare([prompt], params)
        job.result(job.run())
        backend.synchronize()
        with_model = _memory_bytes(BackendProcesses(getattr(backend, "workers", tuple)()).pids())
        backend.close()
        del backend, job
        without = _memory_bytes(())
        if with_model is None or without is None:
            return None
        loaded.append(with_model)
        closed.append(without)
    return LoadCycles(tuple(loaded), tuple(closed))


def try_loading(
    factory: str,
    model: Mapping[str, Any],
    options: Mapping[str, Any],
    context: RankContext,
    tries: Sequence[Mapping[str, Any]],
) -> list[Refusal | None]:
    """Load once with each of ``tries`` replacing ``model`` or ``options``. Returns the error of each, if any.

    The class of the error decides whether the backend passes.
    """
    found: list[Refusal | None] = []
    for each in tries:
        given = {"model": model, "options": options, **each}
        backend = create_backend(factory)
        try:
            backend.load(ModelSource(**given["model"]), given["options"], context)
        except Exception as error:
            declared = isinstance(error, (ModelError, BackendError))
            found.append(Refusal(type(error).__name__, str(error), declared))
        else:
            backend.close()
            found.append(None)
    return found


def model_fields(model: ModelSource) -> dict[str, Any]:
    """Return a model as ``try_loading`` takes it."""
    return {"model": asdict(model)}


def _memory_bytes(others: Collection[int]) -> int | None:
    """Return the memory of this process and ``others``; ``None`` if the system does not report it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Freed memory that glibc's allocator keeps is not a leak (malloc_trim(3)).
        ctypes.CDLL(None).malloc_trim(0)
    here = memory_bytes()
    # A process that has ended has no memory.
    return None if here is None else here + sum(memory_bytes(pid) or 0 for pid in others)
