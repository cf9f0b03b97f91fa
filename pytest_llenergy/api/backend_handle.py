# SPDX-License-Identifier: Apache-2.0
"""BackendHandle, which the fixture ``backend`` returns: a backend with a model on the test's devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_llenergy.api.context import TestContext, raise_rank_outcomes
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.registry import Requirements, explain_unmet
from pytest_llenergy.backends.tasks import (
    EMBED,
    GENERATE,
    SERVE,
    TASKS,
    Embedding,
    Generation,
    GenerationParams,
    Params,
    Probe,
    ServedLoad,
    ServeParams,
    Task,
)
from pytest_llenergy.errors import BackendError, PlanError
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.text import did_you_mean
from pytest_llenergy.session import diagnose_failed_start
from pytest_llenergy.traffic.requests import (
    Inputs,
    check_inputs,
    complete_arguments,
    describe_inputs,
    digest_inputs,
)
from pytest_llenergy.workers.pool import Load
from pytest_llenergy.workers.workload import RankWorkload, task_workload


@dataclass(frozen=True)
class BackendHandle:
    """A backend with a model on the test's devices. The model is loaded on first use.

    Attributes:
        model: The model and where it comes from.
        options: Load options, from the mark ``backend_options`` and ``with_options``.
    """

    spec: BackendSpec = field(repr=False)
    model: ModelSource
    context: TestContext = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the backend, as in ``--energy-backend``."""
        return self.spec.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that the backend supports, such as ``generate``."""
        return self.spec.capabilities.tasks

    def with_options(self, **options: Any) -> BackendHandle:
        """Return the same backend with additional load options, such as ``dtype="float32"``.

        Raises:
            BackendError: The backend does not take one of them.
        """
        options = self.spec.capabilities.without_off(options)
        accepted = self.spec.capabilities.options
        unknown = sorted(self.spec.capabilities.unknown_options(options))
        if unknown:
            row = self.spec.capabilities
            hints = (
                f"it takes: {', '.join(accepted) or 'none'}",
                *row.option_reasons(unknown),
                did_you_mean(unknown, accepted),
            )
            message = "; ".join(filter(None, hints))
            raise BackendError(f"{self.name}: unknown load option {', '.join(unknown)}; {message}")
        return BackendHandle(self.spec, self.model, self.context, {**self.options, **options})

    def generate(self, prompts: Inputs, **params: Any) -> Generation:
        """Generate text for a batch of prompts, unmeasured. ``energy(backend.generate, ...)`` measures it.

        Args:
            prompts: The batch, split over data-parallel ranks.
            **params: Fields of ``GenerationParams``, such as ``max_new_tokens=64`` (tokens).

        Returns:
            The outputs in the order of the prompts.

        Raises:
            BackendError: The backend does not support the task or a parameter.
        """
        done: Generation = self._run(GENERATE, prompts, params)
        return done

    def embed(self, texts: Inputs, **params: Any) -> Embedding:
        """Embed a batch of texts, unmeasured. ``energy(backend.embed, ...)`` measures it.

        Args:
            texts: The batch, split over data-parallel ranks.
            **params: Fields of ``EmbeddingParams``.

        Returns:
            The vectors in the order of the texts.

        Raises:
            BackendError: The backend does not embed.
        """
        done: Embedding = self._run(EMBED, texts, params)
        return done

    def serve(self, prompts: Inputs, **params: Any) -> ServedLoad:
        """Send a load of requests, unmeasured. ``energy(backend.serve, ...)`` measures it.

        Args:
            prompts: Texts or requests, used in turn.
            **params: Fields of ``ServeParams``, such as ``request_rate=2.0`` (requests per second) or
                ``concurrency=4`` (requests at a time).

        Returns:
            The answers with their latencies.

        Raises:
            BackendError: The backend does not serve.
        """
        done: ServedLoad = self._run(SERVE, prompts, params)
        return done

    def task_of(self, method: Any) -> Task | None:
        """Return the task that a method of this handle runs, or None for any other callable."""
        if getattr(method, "__self__", None) is not self:
            return None
        return TASKS.get(method.__func__.__name__)

    def parse(self, task: Task, inputs: Inputs, params: dict[str, Any]) -> Params:
        """Check the inputs and parameters of a task, and return the latter; raises as ``workload`` does."""
        check_inputs(task.name, inputs)
        return task.params.parse(complete_arguments(task.name, inputs, params))

    def workload(
        self, task: Task, inputs: Inputs, params: dict[str, Any], probe: Probe | None = None
    ) -> RankWorkload:
        """Load the model in the ranks and return the batch as their workload; ``probe`` is of a search.

        Raises:
            BackendError: The inputs are not a list of strings or requests, or the backend does not support
                the task.
        """
        checked = self.parse(task, inputs, params)
        if isinstance(checked, ServeParams):
            checked = msgspec.structs.replace(checked, probe=probe)
        self._check(task, checked)
        self._check_hosts()
        plan = self.context.plan_ranks(self.spec.capabilities, self.spec.python)
        if len(inputs) < plan.parallel.data:
            raise BackendError(
                f"{task.name}: {len(inputs)} prompts for {plan.parallel.data} data-parallel ranks; a rank "
                "would have no work"
            )
        load = Load.from_options(self.spec, self.model, {**self.spec.preset, **self.options})
        with diagnose_failed_start(self.context.state, plan):
            group, info = self.context.state.pool.get_loaded(plan, load, self.context.check_running)
        self.context.record_ranks(group)
        if self.context.draft.experiment is None:
            self.context.draft.backend = _with_task(self.name, info, inputs, checked)
        return task_workload(group, inputs, checked, self.context.settings.timeout)

    def _run(self, task: Task, inputs: Inputs, params: dict[str, Any]) -> Any:
        with self.context.lock, raise_rank_outcomes():
            workload = self.workload(task, inputs, params)
            workload.run_round()
            return task.result.merge(workload.results())

    def _check_hosts(self) -> None:
        """Raise ``PlanError`` if the model does not fit on a host and the backend uses one host for it."""
        gang = self.context.draft.gang
        if gang is not None:
            per_host = min(len(each.lease.devices) for each in gang.hosts)
            plan = self.context.plan
            required = Requirements(plan.parallel, plan.device_count, per_host=per_host)
            refusal = explain_unmet(self.spec, required, self.context.state.backends)
            if refusal is not None:
                raise PlanError(refusal)

    def _check(self, task: Task, params: Params) -> None:
        """Raise ``BackendError`` if the capability row lacks the task, the cache or a parameter."""
        row = self.spec.capabilities
        if task.name not in row.tasks:
            raise BackendError(f"{self.name} does not {task.name}; it does: {', '.join(row.tasks)}")
        if isinstance(params, GenerationParams):
            row.loaded_with(self.options).refuse_params(self.name, params)


def _with_task(name: str, info: BackendInfo, inputs: Inputs, params: Params) -> BackendInfo:
    """Add the task, and the name of the backend in this run: several specs can share a class."""
    generation = describe_inputs(params.task, inputs, params.primitives())
    return msgspec.structs.replace(
        info, name=name, task=params.task, generation=generation, prompts_digest=digest_inputs(inputs)
    )
