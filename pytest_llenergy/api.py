# SPDX-License-Identifier: Apache-2.0
"""Objects that fixtures return: BackendHandle, Workers, Energy with its result Run, and EnergyMeter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from threading import RLock
from typing import Any, Literal

import msgspec
import pytest

from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.backends.tasks import (
    EMBED,
    GENERATE,
    SERVE,
    TASKS,
    Embedding,
    Generation,
    GenerationParams,
    Params,
    ServedLoad,
    Task,
)
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import BackendError, LLEnergyError, MeterError, PlanError
from pytest_llenergy.measure.experiment import Experiment, RoundPlan, measure
from pytest_llenergy.measure.metrics import flops_metrics
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.meters.base import Targets
from pytest_llenergy.meters.select import Selection, open_meters
from pytest_llenergy.meters.window import Measuring, Window
from pytest_llenergy.model.prompts import digest_prompts
from pytest_llenergy.model.record import BackendInfo, Metric, Round
from pytest_llenergy.model.text import did_you_mean
from pytest_llenergy.model.timeline import FUNCTION_FLOPS_REASON, Flops
from pytest_llenergy.options import Settings
from pytest_llenergy.plan import TestPlan
from pytest_llenergy.progress import describe_step
from pytest_llenergy.recorder import Draft
from pytest_llenergy.session import RunState, diagnose_failed_start
from pytest_llenergy.workers.failure import OutcomeInRank
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.pickling import REFUSAL, check_finished, is_lazy
from pytest_llenergy.workers.plan import ProcessPlan, plan_processes
from pytest_llenergy.workers.pool import Load
from pytest_llenergy.workers.workload import RankWorkload, call_workload, task_workload

#: Longest wait at the end of a test for one of its threads, after the ranks that it used were killed.
THREAD_TIMEOUT_S = 2.0


@contextmanager
def raise_rank_outcomes() -> Iterator[None]:
    """Raise pytest outcomes of ranks, such as a skip, as outcomes of this process."""
    try:
        yield
        return
    except OutcomeInRank as error:
        outcome, reason, exit_code = error.outcome, error.reason, error.exit_code
    # Outside the except block, or pytest would show the rank's error as well.
    if outcome == "Skipped":
        # ``pytest.skip`` would report this line as the location of the skip.
        raise pytest.skip.Exception(reason, _use_item_location=True)
    if outcome == "XFailed":
        pytest.xfail(reason)
    if outcome == "Exit":
        pytest.exit(reason, exit_code)
    if outcome == "KeyboardInterrupt":
        raise KeyboardInterrupt(reason)
    pytest.fail(reason, pytrace=False)


@dataclass(repr=False)
class TestContext:
    """Context that the fixtures of one test share: its plan, lease and draft, and the state of the run."""

    __test__ = False  # pytest would collect a class of this name

    state: RunState
    plan: TestPlan
    lease: Lease
    draft: Draft
    node_id: str
    #: Whether the test has ended. Objects that outlive it must not use devices that others may lease again.
    over: bool = False
    #: Held while a thread uses the ranks.
    lock: RLock = field(default_factory=RLock)

    @property
    def settings(self) -> Settings:
        """Options of the run."""
        return self.state.settings

    def plan_ranks(self, capabilities: Capabilities, python: str | None = None) -> ProcessPlan:
        """Plan the rank processes of a backend with these capabilities, in the interpreter ``python``.

        Raises:
            PlanError: The test has ended, or its degrees do not fit its devices.
        """
        self.check_running()
        threads = self.settings.threads
        return plan_processes(capabilities, self.plan.parallel, self.lease, usable_cpus(), threads, python)

    def check_running(self) -> None:
        """Raise ``PlanError`` if the test has ended."""
        if self.over:
            raise PlanError(
                "the test of these workers has ended; use the fixtures in the test that asks for them"
            )

    def end(self) -> None:
        """End the test's use of ranks, and kill them if one of its threads still uses them."""
        self.over = True
        if not self.lock.acquire(blocking=False):
            self.state.pool.kill()
            # Wait until the thread notices. It may continue in this process for ever, for example pickling,
            # but its ranks are gone and it gets no others.
            if not self.lock.acquire(timeout=THREAD_TIMEOUT_S):
                return
        self.lock.release()

    def record_ranks(self, group: RankGroup) -> None:
        """Describe the ranks in the draft, unless the test was already measured, with other ranks."""
        draft, plan = self.draft, group.plan
        if draft.experiment is None:
            draft.parallel, draft.launch, draft.start_method = plan.parallel, plan.launch, group.start_method
            draft.ranks, draft.start_s = group.ranks, group.start_s


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
        accepted = self.spec.capabilities.options
        unknown = sorted(set(options) - set(accepted))
        if unknown:
            hints = (f"it takes: {', '.join(accepted) or 'none'}", did_you_mean(unknown, accepted))
            message = "; ".join(filter(None, hints))
            raise BackendError(f"{self.name}: unknown load option {', '.join(unknown)}; {message}")
        return BackendHandle(self.spec, self.model, self.context, {**self.options, **options})

    def generate(self, prompts: Sequence[str], **params: Any) -> Generation:
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

    def embed(self, texts: Sequence[str], **params: Any) -> Embedding:
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

    def serve(self, prompts: Sequence[str], **params: Any) -> ServedLoad:
        """Send a load of requests, unmeasured. ``energy(backend.serve, ...)`` measures it.

        Args:
            prompts: One prompt per request.
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

    def workload(self, task: Task, inputs: Sequence[str], params: dict[str, Any]) -> RankWorkload:
        """Load the model in the ranks and return the batch as their workload.

        Raises:
            BackendError: The inputs are not a list of strings, or the backend does not support the task.
        """
        if isinstance(inputs, str) or not inputs or not all(isinstance(each, str) for each in inputs):
            raise BackendError(f"{task.name}: prompts must be a list of one or more strings")
        checked = task.params.parse(params)
        self._check(task, checked)
        plan = self.context.plan_ranks(self.spec.capabilities, self.spec.python)
        if len(inputs) < plan.parallel.data:
            raise BackendError(
                f"{task.name}: {len(inputs)} prompts for {plan.parallel.data} data-parallel ranks; a rank "
                "would have no work"
            )
        load = Load.from_options(self.spec, self.model, {**self.spec.preset, **self.options})
        with diagnose_failed_start(plan):
            group, info = self.context.state.pool.get_loaded(plan, load, self.context.check_running)
        self.context.record_ranks(group)
        if self.context.draft.experiment is None:
            self.context.draft.backend = _with_task(info, inputs, checked)
        return task_workload(group, inputs, checked, self.context.settings.timeout)

    def _run(self, task: Task, inputs: Sequence[str], params: dict[str, Any]) -> Any:
        with self.context.lock, raise_rank_outcomes():
            workload = self.workload(task, inputs, params)
            workload.run_round()
            return task.result.merge(workload.results())

    def _check(self, task: Task, params: Params) -> None:
        """Raise ``BackendError`` if the capability row lacks the task or the cache."""
        row = self.spec.capabilities
        if task.name not in row.tasks:
            raise BackendError(f"{self.name} does not {task.name}; it does: {', '.join(row.tasks)}")
        if isinstance(params, GenerationParams) and params.cache not in row.caches:
            offered = ", ".join(row.caches)
            raise BackendError(f"{self.name} has no {params.cache} cache; it offers: {offered}")


@dataclass(frozen=True)
class Call:
    """A call on every rank, not run yet, for ``energy`` to measure. ``workers.call`` returns it."""

    workers: Workers
    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def workload(self) -> RankWorkload:
        """Start the ranks and return the call as their workload."""
        group = self.workers.group()
        timeout_s = self.workers.context.settings.timeout
        return call_workload(group, self.function, self.args, self.kwargs, timeout_s)


@dataclass(frozen=True)
class Workers:
    """The ranks of this test, one process per device, which run functions of the test.

    With torch installed, the ranks form one ``torch.distributed`` process group: gloo on CPUs, NCCL on GPUs.
    The environment variables ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set in each.
    """

    context: TestContext

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.context.lease.devices)

    def group(self) -> RankGroup:
        """Return the ranks, started on first use."""
        framework: Literal["torch"] | None = "torch" if find_spec("torch") is not None else None
        plan = self.context.plan_ranks(Capabilities(framework=framework, process_group=True, data=True))
        with diagnose_failed_start(plan):
            group = self.context.state.pool.get_ranks(plan, self.context.check_running)
        self.context.record_ranks(group)
        return group

    def run(
        self, function: Callable[..., Any] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank.

        Args:
            function: A function, sent by value with all that it uses if the test file defines it, or
                ``"module:function"``, which the ranks import.
            *args: Arguments for the function.
            timeout: Longest wait for the results (seconds); None waits for ``--energy-timeout``.
            **kwargs: Keyword arguments for the function.

        Returns:
            The result of each rank, in the order of ranks.

        Raises:
            WorkerError: A rank failed. The error has the traceback of the first such rank. Skip, xfail and
                fail in a rank become outcomes of the test.
        """
        with self.context.lock, raise_rank_outcomes():
            if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
                raise PlanError(f"workers.run: timeout is {timeout!r}, needs a number of seconds above 0")
            seconds = self.context.settings.timeout if timeout is None else timeout
            workload = call_workload(self.group(), function, args, kwargs, seconds)
            workload.run_round()
            return workload.results()

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Call:
        """Return a call of a function on every rank without running it: ``energy(workers.call(step))``.

        Args:
            function: As for ``run``.
            *args: Arguments for the function.
            **kwargs: Keyword arguments for the function.
        """
        return Call(self, function, args, kwargs)


def make_backend(context: TestContext, name: str, model: str) -> BackendHandle:
    """Return the handle of a backend for one test.

    Skips the test if the backend cannot read the model or run on the test's devices.

    Args:
        context: The test, whose plan has the load options.
        name: Name of the backend.
        model: Hub id, path or preset, as for ``--energy-model``.

    Raises:
        ModelError: The model does not exist.
    """
    spec, lease = context.state.backends[name], context.lease
    source = resolve_model(model)
    reason = spec.refuses(source)
    if reason is None and lease.uuids and not spec.capabilities.gpu:
        reason = f"{spec.name} does not run on GPUs here"
    if reason is None and not lease.uuids and not spec.capabilities.cpu:
        why = spec.capabilities.reasons.get("cpu", "")
        reason = f"{spec.name} does not run on the CPU here{f' ({why})' if why else ''}"
    if reason is not None:
        pytest.skip(reason)
    return BackendHandle(spec, source, context, dict(context.plan.backend_options or {}))


def _with_task(info: BackendInfo, inputs: Sequence[str], params: Params) -> BackendInfo:
    return msgspec.structs.replace(
        info, task=params.task, generation=params.primitives(), prompts_digest=digest_prompts(inputs)
    )


@dataclass(frozen=True)
class Run:
    """Result of ``energy``. Every metric is an attribute too, such as ``run.energy_per_output_token_j``.

    Attributes:
        rounds: Each measured round, with its energy in joules and its duration in seconds.
        metrics: Each metric by name, with unit, standard uncertainty and number of rounds. Names end in
            their unit.
        result: What the measured call returned in the last round.
    """

    rounds: list[Round]
    metrics: dict[str, Metric]
    result: Any

    def __getattr__(self, name: str) -> float:
        metrics = self.__dict__.get("metrics", {})
        if name not in metrics:
            raise AttributeError(f"a run has no {name}; metrics: {', '.join(metrics)}")
        metric = metrics[name]
        if metric.value is None:
            raise LLEnergyError(f"{name} has no value: {metric.reason}")
        return float(metric.value)


class Energy:
    """The fixture ``energy``: measures a call, ``energy(backend.generate, prompts, max_new_tokens=64)``."""

    def __init__(self, context: TestContext) -> None:
        self._context = context

    def __call__(self, work: Callable[..., Any] | Call, /, *args: Any, **kwargs: Any) -> Run:
        """Run ``work(*args, **kwargs)`` as warm-up and measured rounds.

        Args:
            work: ``backend.generate`` or another task, or ``workers.call(...)``, which run in the ranks; or
                a function, which runs in the ranks too if the test has a ``gpus`` mark, otherwise in this
                process.
            *args: Arguments for the call.
            **kwargs: Keyword arguments for the call.

        Returns:
            Rounds, metrics and the result of the last round.

        Raises:
            LLEnergyError: Called twice in one test, or ``work`` is not callable.
            MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
        """
        context = self._context
        draft, settings = context.draft, context.settings
        if draft.experiment is not None:
            raise LLEnergyError(
                "energy() was called twice in one test; parametrize the test, or use energy_meter(name) for "
                "several windows"
            )
        # Open the meters before the model, which may load for minutes: a requested meter may be missing.
        selection = open_test_meters(context)
        progress = context.state.progress.track(context.node_id)
        with raise_rank_outcomes(), progress as show, ExitStack() as locked:
            locked.enter_context(context.lock)
            try:
                show(_describe_preparation(work))
                workload, result = self._workload(work, args, kwargs)
            except BaseException:
                selection.close()
                raise
            if isinstance(workload, CallWorkload):
                # It runs in this process. Its threads may use the ranks, for which they need the lock.
                draft.forget_ranks()
                locked.close()
            plan = RoundPlan(settings.rounds, settings.warmup, settings.gap, settings.target, settings.budget)
            draft.experiment = measure(
                workload, plan, selection, context.lease, lambda step: show(describe_step(step))
            )
            if isinstance(workload, RankWorkload):
                draft.rank_peak_memory_bytes = workload.rank_peak_memory_bytes
            value = result()
            if settings.flops:
                show("counting floating-point operations")
                # Last, since counting may load, compile or cache something that would change a later round.
                draft.experiment = _with_flops(draft.experiment, workload)
        return Run(draft.experiment.rounds, draft.experiment.metrics, value)

    def _workload(
        self, work: Callable[..., Any] | Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RankWorkload | CallWorkload, Callable[[], Any]]:
        """Return the workload, and a function that returns its result."""
        handle = getattr(work, "__self__", None)
        task = handle.task_of(work) if isinstance(handle, BackendHandle) else None
        if isinstance(handle, BackendHandle) and task is not None:
            ranks = handle.workload(task, *_inputs(*args, **kwargs))
            return ranks, lambda: task.result.merge(ranks.results())
        if not isinstance(work, Call) and callable(work) and self._context.plan.gpus is not None:
            work = Workers(self._context).call(work, *args, **kwargs)
        elif isinstance(work, Call) and (args or kwargs):
            raise LLEnergyError("energy(workers.call(fn, ...)): pass the arguments to call, not to energy")
        if isinstance(work, Call):
            ranks = work.workload()
            return ranks, ranks.results
        if not callable(work):
            raise LLEnergyError(f"energy: {work!r} is not callable; pass the function, not its result")
        if is_lazy(work):
            raise LLEnergyError(f"energy: {REFUSAL}, or use async with energy_meter(name)")
        function = work
        local = CallWorkload(lambda: function(*args, **kwargs))
        return local, lambda: check_finished(local.result, "energy")


def _describe_preparation(work: Callable[..., Any] | Call) -> str:
    handle = getattr(work, "__self__", None)
    if isinstance(handle, BackendHandle):
        return f"loading {handle.model.label} with {handle.name}"
    return "preparing"


def _with_flops(experiment: Experiment, workload: RankWorkload | CallWorkload) -> Experiment:
    flops = workload.flops() if isinstance(workload, RankWorkload) else Flops.unknown(FUNCTION_FLOPS_REASON)
    counted = flops_metrics(experiment.metrics["energy_j"], flops)
    return replace(experiment, metrics={**experiment.metrics, **counted})


class EnergyMeter:
    """The fixture ``energy_meter``: measures stretches of a test.

    ``with energy_meter("load") as window:`` measures a window; so do ``async with``, and the pair
    ``energy_meter.begin("load")`` and ``energy_meter.end("load")``. Windows may nest and overlap. The meters
    stay open until the test ends.
    """

    def __init__(self, context: TestContext) -> None:
        self._context = context
        self._measuring: Measuring | None = None

    def __call__(self, name: str) -> Window:
        """Return a new window, a context manager.

        Args:
            name: Name of the window in the record.

        Raises:
            MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
        """
        return self._add(self._open().window(name))

    def begin(self, name: str) -> Window:
        """Begin a window; ``end`` with the same name closes it.

        Raises:
            MeterError: A window of that name is open, or requested meters are unavailable.
        """
        return self._add(self._open().begin(name))

    def end(self, name: str) -> Window:
        """End the window of that name.

        Returns:
            The window, with its energy in joules and its duration in seconds.

        Raises:
            MeterError: No window of that name is open.
        """
        return self._open().end(name)

    def close(self) -> None:
        """Stop reading and close the meters."""
        if self._measuring is not None:
            self._measuring.stop()

    def _open(self) -> Measuring:
        if self._measuring is None:
            self._measuring = Measuring(open_test_meters(self._context))
            self._measuring.start()
            series = self._measuring.series
            self._context.draft.meters = [each.domain.info(each.meter) for each in series]
        return self._measuring

    def _add(self, window: Window) -> Window:
        self._context.draft.windows.append(window)
        return window


def open_test_meters(context: TestContext) -> Selection:
    """Open the meters for the devices of a test.

    If no meter was requested and the host has none, the selection is empty and names the reason; the test's
    record then has no energy.

    Raises:
        MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
    """
    settings = context.settings
    required = settings.require == "measured"
    targets = Targets(context.lease.uuids)
    try:
        return open_meters(settings.meter, context.state.meters, targets, require_measured=required)
    except MeterError as error:
        if required or settings.meter:
            raise
        return Selection((), (str(error),))


def _inputs(inputs: Any, /, **params: Any) -> tuple[Any, dict[str, Any]]:
    return inputs, params
