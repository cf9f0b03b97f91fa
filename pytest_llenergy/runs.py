# SPDX-License-Identifier: Apache-2.0
"""Measuring from a test: the ``energy`` and ``energy_meter`` callables and what they return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pytest_llenergy.errors import LLEnergyError, MeterError
from pytest_llenergy.handles import BackendHandle, Call, Place, Workers, outcomes
from pytest_llenergy.measure.call import CallWorkload
from pytest_llenergy.measure.efficiency import flops_metrics
from pytest_llenergy.measure.experiment import Experiment, RoundPlan, measure
from pytest_llenergy.meters.measuring import Measuring
from pytest_llenergy.meters.protocol import Targets
from pytest_llenergy.meters.select import Selection, open_meters
from pytest_llenergy.meters.window import Window
from pytest_llenergy.model.flops import OF_A_FUNCTION, Flops
from pytest_llenergy.model.record import Metric, Round
from pytest_llenergy.report.progress import told
from pytest_llenergy.workers.lazy import REFUSAL, finished, is_lazy
from pytest_llenergy.workers.workload import RankWorkload


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
        return local, lambda: finished(local.result, "energy")


def _preparing(work: Callable[..., Any] | Call) -> str:
    """What comes before anything is measured; with a model it may take minutes."""
    handle = getattr(work, "__self__", None)
    if isinstance(handle, BackendHandle):
        return f"loading {handle.model.label} with {handle.name}"
    return "preparing"


def _with_flops(experiment: Experiment, workload: RankWorkload | CallWorkload) -> Experiment:
    flops = workload.flops() if isinstance(workload, RankWorkload) else Flops.unknown(OF_A_FUNCTION)
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
