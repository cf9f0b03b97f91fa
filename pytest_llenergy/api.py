# SPDX-License-Identifier: Apache-2.0
"""Objects that fixtures return: Energy, EnergyMeter, Run, BackendHandle, Workers."""

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

from pytest_llenergy import marks
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
from pytest_llenergy.model.record import BackendInfo, Metric, Parallel, Round
from pytest_llenergy.model.text import did_you_mean
from pytest_llenergy.model.timeline import FUNCTION_FLOPS_REASON, Flops
from pytest_llenergy.options import Settings
from pytest_llenergy.plan import read_mark
from pytest_llenergy.progress import told
from pytest_llenergy.recorder import Draft, draft_of
from pytest_llenergy.session import State, diagnosed, state_of
from pytest_llenergy.workers.failure import OutcomeInRank
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.pickling import REFUSAL, check_finished, is_lazy
from pytest_llenergy.workers.plan import ProcessPlan, plan_processes
from pytest_llenergy.workers.pool import Load
from pytest_llenergy.workers.workload import RankWorkload, call_workload, task_workload

# What tests hold and call: a backend to generate with, workers for functions of their own.

#: How long the end of a test waits for a thread of it that has lost its ranks (seconds).
PATIENCE_S = 2.0


@contextmanager
def outcomes() -> Iterator[None]:
    """Give pytest's outcomes that were raised inside ranks their meaning in this process."""
    try:
        yield
        return
    except OutcomeInRank as error:
        outcome, reason, exit_code = error.outcome, error.reason, error.exit_code
    # It was the test's own decision, made in a rank. Not while handling it: pytest would show both.
    if outcome == "Skipped":
        # Told with the place of the test, not of this line.
        raise pytest.skip.Exception(reason, _use_item_location=True)
    if outcome == "XFailed":
        pytest.xfail(reason)
    if outcome == "Exit":
        pytest.exit(reason, exit_code)
    if outcome == "KeyboardInterrupt":
        raise KeyboardInterrupt(reason)
    pytest.fail(reason, pytrace=False)


@dataclass(repr=False)
class Place:
    """Where a test runs: its lease, its degrees, and the process-wide state it draws on."""

    state: State
    lease: Lease
    parallel: Parallel | None
    draft: Draft
    #: Its node id.
    test: str = ""
    #: Set once the test has ended: what others have kept of it must not run on devices that are free.
    over: bool = False
    #: Held by whoever uses the ranks.
    lock: RLock = field(default_factory=RLock)

    @property
    def settings(self) -> Settings:
        """The options of the run."""
        return self.state.settings

    def plan(self, capabilities: Capabilities, python: str | None = None) -> ProcessPlan:
        """The process plan for an engine with these capabilities, in this interpreter.

        Raises ``PlanError`` when the test has ended.
        """
        self.check()
        threads = self.settings.threads
        return plan_processes(capabilities, self.parallel, self.lease, usable_cpus(), threads, python)

    def check(self) -> None:
        """Raises ``PlanError`` when the test has ended."""
        if self.over:
            raise PlanError(
                "the test of these workers has ended; use the fixtures in the test that asks for them"
            )

    def end(self) -> None:
        """The test has ended. What a thread of it still does in the ranks ends too."""
        self.over = True
        if not self.lock.acquire(blocking=False):
            self.state.pool.kill()
            # Once it has seen that. What it does in this process, such as pickling, may take for ever; it has
            # no ranks any more, and is given no others.
            if not self.lock.acquire(timeout=PATIENCE_S):
                return
        self.lock.release()

    def note(self, group: RankGroup) -> None:
        """Keep the ranks as they were seen. What comes after the measurement is not what was measured."""
        draft, plan = self.draft, group.plan
        if draft.experiment is None:
            draft.parallel, draft.launch, draft.start_method = plan.parallel, plan.launch, group.start_method
            draft.ranks, draft.start_s = group.ranks, group.start_s


def place_of(item: pytest.Item, lease: Lease) -> Place:
    """Where a test with this lease runs. Raises ``PlanError`` for its degrees."""
    degrees = read_mark(item, marks.parallel)
    return Place(state_of(item.config), lease, degrees, draft_of(item), item.nodeid)


@dataclass(frozen=True)
class BackendHandle:
    """An engine with a model, for this test's devices. The model is loaded when it is first needed.

    ``with_options(dtype="float32")`` gives the same engine with other load options.
    """

    spec: BackendSpec = field(repr=False)
    model: ModelSource
    place: Place = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, as in ``--energy-backend``."""
        return self.spec.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it does, such as ``generate``."""
        return self.spec.capabilities.tasks

    def with_options(self, **options: Any) -> BackendHandle:
        """The same backend with load options. Raises ``BackendError`` for one that it does not take."""
        known = self.spec.capabilities.options
        unknown = sorted(set(options) - set(known))
        if unknown:
            told = f"it takes: {', '.join(known) or 'none'}"
            told = "; ".join(filter(None, (told, did_you_mean(unknown, known))))
            raise BackendError(f"{self.name}: unknown load option {', '.join(unknown)}; {told}")
        return BackendHandle(self.spec, self.model, self.place, {**self.options, **options})

    def generate(self, prompts: Sequence[str], **params: Any) -> Generation:
        """Generate for a batch of prompts, unmeasured; give the method itself to ``energy`` to measure.

        Keyword arguments are those of ``GenerationParams``. Prompts are split over data-parallel ranks;
        the answer is in their order.
        """
        done: Generation = self._done(GENERATE, prompts, params)
        return done

    def embed(self, texts: Sequence[str], **params: Any) -> Embedding:
        """Make a vector of each text, unmeasured; give the method itself to ``energy`` to measure.

        Keyword arguments are those of ``EmbeddingParams``. Raises ``BackendError`` where the engine does not
        embed.
        """
        done: Embedding = self._done(EMBED, texts, params)
        return done

    def serve(self, prompts: Sequence[str], **params: Any) -> ServedLoad:
        """Send a load of requests, unmeasured; give the method itself to ``energy`` to measure.

        Keyword arguments are those of ``ServeParams``, such as ``request_rate=2.0`` or ``concurrency=4``.
        """
        done: ServedLoad = self._done(SERVE, prompts, params)
        return done

    def task_of(self, method: Any) -> Task | None:
        """The task that a method of this handle does; ``None`` for any other callable."""
        if getattr(method, "__self__", None) is not self:
            return None
        return TASKS.get(method.__func__.__name__)

    def workload(self, task: Task, inputs: Sequence[str], params: dict[str, Any]) -> RankWorkload:
        """The batch, prepared in the ranks. Raises ``BackendError`` for what the engine does not offer."""
        if isinstance(inputs, str) or not inputs or not all(isinstance(each, str) for each in inputs):
            raise BackendError(f"{task.name}: prompts must be a list of one or more strings")
        checked = task.params.parse(params)
        self._check(task, checked)
        plan = self.place.plan(self.spec.capabilities, self.spec.python)
        if len(inputs) < plan.parallel.data:
            raise BackendError(
                f"{task.name}: {len(inputs)} prompts for {plan.parallel.data} data-parallel ranks; a rank "
                "would have no work"
            )
        load = Load.from_options(self.spec, self.model, {**self.spec.preset, **self.options})
        with diagnosed(plan):
            group, info = self.place.state.pool.get_loaded(plan, load, self.place.check)
        self.place.note(group)
        if self.place.draft.experiment is None:
            self.place.draft.backend = _told(info, inputs, checked)
        return task_workload(group, inputs, checked, self.place.settings.timeout)

    def _done(self, task: Task, inputs: Sequence[str], params: dict[str, Any]) -> Any:
        with self.place.lock, outcomes():
            workload = self.workload(task, inputs, params)
            workload.run_round()
            return task.result.merge(workload.results())

    def _check(self, task: Task, params: Params) -> None:
        """Hold what is asked for against the capability row."""
        row = self.spec.capabilities
        if task.name not in row.tasks:
            raise BackendError(f"{self.name} does not {task.name}; it does: {', '.join(row.tasks)}")
        if isinstance(params, GenerationParams) and params.cache not in row.caches:
            offered = ", ".join(row.caches)
            raise BackendError(f"{self.name} has no {params.cache} cache; it offers: {offered}")


@dataclass(frozen=True)
class Call:
    """A call to be made on every rank, for ``energy`` to measure."""

    workers: Workers
    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def workload(self) -> RankWorkload:
        """The call, prepared in the ranks."""
        group = self.workers.group()
        timeout_s = self.workers.place.settings.timeout
        return call_workload(group, self.function, self.args, self.kwargs, timeout_s)


@dataclass(frozen=True)
class Workers:
    """The ranks of this test, for functions of its own.

    With torch installed they are in one ``torch.distributed`` process group (gloo on CPUs, NCCL on GPUs).
    ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set.
    """

    place: Place

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.place.lease.devices)

    def group(self) -> RankGroup:
        """The running ranks, started on first use."""
        framework: Literal["torch"] | None = "torch" if find_spec("torch") is not None else None
        plan = self.place.plan(Capabilities(framework=framework, process_group=True, data=True))
        with diagnosed(plan):
            group = self.place.state.pool.get_ranks(plan, self.place.check)
        self.place.note(group)
        return group

    def run(
        self, function: Callable[..., Any] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank. Returns the results by rank.

        Functions of the test file travel by value, with what they use; ``"module:function"`` is imported in
        the ranks instead.

        ``timeout`` is seconds; without it ``--energy-timeout`` counts. Raises ``WorkerError`` with the
        traceback of the rank that failed first; skip, xfail and fail keep their meaning.
        """
        with self.place.lock, outcomes():
            if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
                raise PlanError(f"workers.run: timeout is {timeout!r}, needs a number of seconds above 0")
            seconds = self.place.settings.timeout if timeout is None else timeout
            workload = call_workload(self.group(), function, args, kwargs, seconds)
            workload.run_round()
            return workload.results()

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Call:
        """The same call, not yet made: ``energy(workers.call(step))`` measures it."""
        return Call(self, function, args, kwargs)


def backend_of(item: pytest.Item, place: Place, name: str, model: str) -> BackendHandle:
    """An engine, by its name, with a model, for one test. Skips the test where the two do not go together.

    Raises ``ModelError`` and ``PlanError``.
    """
    spec, lease = place.state.backends[name], place.lease
    source = resolve_model(model)
    refused = spec.refuses(source)
    if refused is None and lease.uuids and not spec.capabilities.gpu:
        refused = f"{spec.name} does not run on GPUs here"
    if refused is None and not lease.uuids and not spec.capabilities.cpu:
        why = spec.capabilities.reasons.get("cpu", "")
        refused = f"{spec.name} does not run on the CPU here{f' ({why})' if why else ''}"
    if refused is not None:
        # The record says why: the engine and the model, or the devices, do not go together.
        pytest.skip(refused)
    options = read_mark(item, marks.backend_options)
    return BackendHandle(spec, source, place, dict(options or {}))


def _told(info: BackendInfo, inputs: Sequence[str], params: Params) -> BackendInfo:
    """The engine with what it is told to do."""
    return msgspec.structs.replace(
        info, task=params.task, generation=params.primitives(), prompts_digest=digest_prompts(inputs)
    )


# Measuring from a test: the ``energy`` and ``energy_meter`` callables and what they return.


@dataclass(frozen=True)
class Run:
    """What ``energy`` returns. Every metric is an attribute; ``result`` is that of the last round."""

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
    """Measure something: ``energy(backend.generate, prompts, max_new_tokens=64)``."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __call__(self, work: Callable[..., Any] | Call, /, *args: Any, **kwargs: Any) -> Run:
        """Run warm-up and rounds of ``work(*args, **kwargs)`` and measure each.

        ``backend.generate`` and ``workers.call(...)`` run in the ranks, and so does any other function
        in a test with a ``gpus`` mark; without one it runs in this process. Raises ``LLEnergyError`` when
        called twice in a test, ``MeterError`` when ``--energy-require`` or ``--energy-meter`` cannot be met.
        """
        draft, settings = self._place.draft, self._place.settings
        if draft.experiment is not None:
            raise LLEnergyError(
                "energy() was called twice in one test; parametrize the test, or use energy_meter(name) for "
                "several windows"
            )
        # What was required is known before a model is loaded for minutes.
        selection = open_for(self._place)
        seen = self._place.state.progress.of(self._place.test)
        with outcomes(), seen as tell, ExitStack() as turn:
            turn.enter_context(self._place.lock)
            try:
                tell(_preparing(work))
                workload, result = self._workload(work, args, kwargs)
            except BaseException:
                selection.close()
                raise
            if isinstance(workload, CallWorkload):
                # It may have the ranks at work from threads of its own, and then is not itself in them.
                draft.forget_ranks()
                turn.close()
            plan = RoundPlan(settings.rounds, settings.warmup, settings.gap, settings.target, settings.budget)
            draft.experiment = measure(
                workload, plan, selection, self._place.lease, lambda step: tell(told(step))
            )
            if isinstance(workload, RankWorkload):
                draft.rank_peak_memory_bytes = workload.rank_peak_memory_bytes
            value = result()
            if settings.flops:
                tell("counting floating-point operations")
                # Last of all: whatever counting loads, compiles or keeps, no round comes after it.
                draft.experiment = _with_flops(draft.experiment, workload)
        return Run(draft.experiment.rounds, draft.experiment.metrics, value)

    def _workload(
        self, work: Callable[..., Any] | Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RankWorkload | CallWorkload, Callable[[], Any]]:
        """What to run, and how to get its result afterwards."""
        handle = getattr(work, "__self__", None)
        task = handle.task_of(work) if isinstance(handle, BackendHandle) else None
        if isinstance(handle, BackendHandle) and task is not None:
            ranks = handle.workload(task, *_inputs(*args, **kwargs))
            return ranks, lambda: task.result.merge(ranks.results())
        if not isinstance(work, Call) and callable(work) and self._place.draft.wants_ranks:
            work = Workers(self._place).call(work, *args, **kwargs)
        elif isinstance(work, Call) and (args or kwargs):
            raise LLEnergyError("energy(workers.call(fn, ...)): give the arguments to call, not to energy")
        if isinstance(work, Call):
            ranks = work.workload()
            return ranks, ranks.results
        if not callable(work):
            raise LLEnergyError(f"energy: {work!r} is not callable; give the function, not its result")
        if is_lazy(work):
            raise LLEnergyError(f"energy: {REFUSAL}, or use async with energy_meter(name)")
        function = work
        local = CallWorkload(lambda: function(*args, **kwargs))
        return local, lambda: check_finished(local.result, "energy")


def _preparing(work: Callable[..., Any] | Call) -> str:
    """What comes before anything is measured; with a model it may take minutes."""
    handle = getattr(work, "__self__", None)
    if isinstance(handle, BackendHandle):
        return f"loading {handle.model.label} with {handle.name}"
    return "preparing"


def _with_flops(experiment: Experiment, workload: RankWorkload | CallWorkload) -> Experiment:
    flops = workload.flops() if isinstance(workload, RankWorkload) else Flops.unknown(FUNCTION_FLOPS_REASON)
    told = flops_metrics(experiment.metrics["energy_j"], flops)
    return replace(experiment, metrics={**experiment.metrics, **told})


class EnergyMeter:
    """``with energy_meter("load") as window:`` measures a stretch of this test, in this process.

    Works with ``async with`` too, and as ``energy_meter.begin("load")``, ``energy_meter.end("load")``.
    Windows may nest and overlap. The meters stay open until the test ends.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._measuring: Measuring | None = None

    def __call__(self, name: str) -> Window:
        """A new window. Raises ``MeterError`` when ``--energy-require`` or ``--energy-meter`` fail."""
        return self._noted(self._open().window(name))

    def begin(self, name: str) -> Window:
        """Open a window by name; ``end`` closes it. Raises ``MeterError`` when one of that name is open."""
        return self._noted(self._open().begin(name))

    def end(self, name: str) -> Window:
        """Close the window of that name. Raises ``MeterError`` when there is none."""
        return self._open().end(name)

    def close(self) -> None:
        """Stop reading and close the meters."""
        if self._measuring is not None:
            self._measuring.stop()

    def _open(self) -> Measuring:
        if self._measuring is None:
            self._measuring = Measuring(open_for(self._place))
            self._measuring.start()
            series = self._measuring.series
            self._place.draft.meters = [each.domain.info(each.meter) for each in series]
        return self._measuring

    def _noted(self, window: Window) -> Window:
        self._place.draft.windows.append(window)
        return window


def open_for(place: Place) -> Selection:
    """Open the meters of a test's devices.

    Raises ``MeterError`` when the user asked for meters that cannot be had; otherwise a host without any
    gives an empty selection with the reasons, and the test a record without joules.
    """
    settings = place.settings
    required = settings.require == "measured"
    targets = Targets(place.lease.uuids)
    try:
        return open_meters(settings.meter, place.state.meters, targets, require_measured=required)
    except MeterError as error:
        if required or settings.meter:
            raise
        return Selection((), (str(error),))


def _inputs(inputs: Any, /, **params: Any) -> tuple[Any, dict[str, Any]]:
    return inputs, params
