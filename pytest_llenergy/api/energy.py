# SPDX-License-Identifier: Apache-2.0
"""Energy, which the fixture ``energy`` returns: measures calls, served loads and their curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.context import TestContext, open_host_meters, raise_rank_outcomes
from pytest_llenergy.api.energy_meter import RecordedValues
from pytest_llenergy.api.load_curve import LoadMeasurement, backend_of, check_slo, parse_rates
from pytest_llenergy.api.run import DisabledRun, LoadRun, Run
from pytest_llenergy.api.workers import Call, Workers
from pytest_llenergy.backends.tasks import SERVE, Generation
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.measure.experiment import Experiment, measure_on_hosts
from pytest_llenergy.measure.host_meters import close_all
from pytest_llenergy.measure.load_search import LoadSearch
from pytest_llenergy.measure.metrics import flops_metrics
from pytest_llenergy.measure.peak_flops import peak_flops, utilization
from pytest_llenergy.measure.roles import role_metrics
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.measure.scoring import Scorer, score_outputs
from pytest_llenergy.model.load_curve import Slo
from pytest_llenergy.model.outputs import digest_outputs
from pytest_llenergy.model.timeline import FUNCTION_FLOPS_REASON, LOADS_FLOPS_REASON, Flops
from pytest_llenergy.options.rounds import (
    PEDANTIC,
    Arguments,
    parse_arguments,
    plan_pedantic_rounds,
    plan_rounds,
)
from pytest_llenergy.progress import describe_step
from pytest_llenergy.traffic.requests import encode_inputs, is_number
from pytest_llenergy.workers.call_tokens import PerCall, TokenCounter, TokensPerCall
from pytest_llenergy.workers.pickling import REFUSAL, check_finished, is_lazy
from pytest_llenergy.workers.workload import RankWorkload

#: Seconds after which a search for the maximum load measures no further rate.
MAX_LOAD_BUDGET_S = 600.0

ENERGY_RAISED = "energy(...) raised {error}, so the test has no result"


class Energy(RecordedValues):
    """The fixture ``energy``: measures a call, ``energy(backend.generate, prompts, max_new_tokens=64)``."""

    def __init__(self, context: TestContext, options: Callable[[], Mapping[str, Any]]) -> None:
        self._context = context
        self._options = options

    def __call__(
        self,
        work: Callable[..., Any] | Call,
        /,
        *args: Any,
        output_tokens: PerCall = None,
        input_tokens: PerCall = None,
        **kwargs: Any,
    ) -> Run:
        """Run ``work(*args, **kwargs)`` as warm-up and measured rounds.

        The names ``output_tokens`` and ``input_tokens`` are reserved: they never reach ``work``. If it has a
        parameter of such a name, bind that by ``functools.partial(fn, output_tokens=...)``.

        Args:
            work: ``backend.generate`` or another task, or ``workers.call(...)``, which run in the ranks; or
                a function, which runs in the ranks too if the test has a ``gpus`` mark, otherwise in this
                process.
            *args: Arguments for the call.
            output_tokens: Tokens that **one call** of your function generates: a number, or a function of the
                call's result that returns one, such as ``lambda ids: len(ids)``. A round of k calls has k
                times as many, or the sum over its k results, which are kept until the round is over. Results
                of the warm-up are counted only to check the function early. Each rank counts its own calls,
                and the test has the sum; ranks that the mark ``parallel(tensor=...)`` or ``pipeline=`` makes
                parts of one model count once. A backend counts its own tokens.
            input_tokens: Tokens that one call reads, likewise.
            **kwargs: Keyword arguments for the call.

        Returns:
            Rounds, metrics and the result of the last call. With several ranks that is a list of their
            results.

        Raises:
            LLEnergyError: Called twice in one test, ``work`` is not callable, or tokens are no numbers.
            MeterError: The meters that ``--energy-meter`` or ``--energy-require`` ask for are unavailable.
        """
        # Here and below: if the work raises, the traceback goes from the test to the work.
        __tracebackhide__ = True
        with self._errors_recorded():
            plan = plan_rounds(self._context.settings, self._options(), self._context.plan.gate)
            tokens = TokensPerCall(input_tokens, output_tokens)
            return self._measure(plan, work, Arguments(args, kwargs, tokens))

    def pedantic(
        self,
        target: Callable[..., Any] | Call,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        teardown: Callable[..., Any] | None = None,
        rounds: int | None = None,
        warmup_rounds: int | None = None,
        iterations: int | None = None,
        *,
        output_tokens: PerCall = None,
        input_tokens: PerCall = None,
    ) -> Run:
        """Run exactly ``warmup_rounds`` and ``rounds`` of ``iterations`` calls, as pytest-benchmark does.

        The target uncertainty and the budget add no rounds. Where a number is left out, that of the mark
        ``energy_options`` applies, otherwise one round of one iteration without warm-up.

        Args:
            target: The work, as for ``energy(...)``.
            args: Arguments for the call.
            kwargs: Keyword arguments for the call.
            setup: Called before each round, not measured. It may return ``(args, kwargs)`` for the call.
                Requires one iteration, and a target that runs in this process.
            teardown: Called after each round with the arguments of the call, not measured. Requires a target
                that runs in this process.
            rounds: Number of measured rounds.
            warmup_rounds: Number of unmeasured rounds before them.
            iterations: Number of calls in each round.
            output_tokens: Tokens that one call generates, as for ``energy(...)``.
            input_tokens: Tokens that one call reads, as for ``energy(...)``.

        Returns:
            As ``energy(...)``.

        Raises:
            LLEnergyError: An argument is invalid, or as for ``energy(...)``.
            MeterError: As for ``energy(...)``.
        """
        __tracebackhide__ = True
        with self._errors_recorded():
            tokens = TokensPerCall(input_tokens, output_tokens)
            arguments = parse_arguments(args, kwargs, setup, teardown, tokens)
            plan = plan_pedantic_rounds(
                plan_rounds(self._context.settings, {**PEDANTIC, **self._options()}, self._context.plan.gate),
                rounds,
                warmup_rounds,
                iterations,
                has_setup=setup is not None,
            )
            return self._measure(plan, target, arguments)

    def load_curve(
        self,
        work: Callable[..., Any],
        prompts: Sequence[str],
        /,
        *,
        request_rates: Sequence[float],
        slo: Slo | None = None,
        **params: Any,
    ) -> LoadRun:
        """Measure a served load at each of several request rates, as one test.

        Each rate is measured as a test would be, with its rounds, target and budget; only the first one has a
        warm-up. The test's rounds and metrics are those of the highest rate that is within the SLO or,
        without an SLO, not saturated; if there is no such rate, those of the lowest.

        Args:
            work: ``backend.serve``.
            prompts: Prompts, used in turn.
            request_rates: Requests per second of each load, in the order of measurement.
            slo: Limits of the latencies.
            **params: Further parameters of ``serve``.

        Returns:
            The points, and the rounds and metrics of one of them.

        Raises:
            LLEnergyError: As for ``energy(...)``, or a rate is invalid.
            MeterError: As for ``energy(...)``.
        """
        __tracebackhide__ = True
        with self._errors_recorded():
            handle, rates = backend_of("load_curve", work, prompts, params), parse_rates(request_rates)
            if slo is not None:
                check_slo("load_curve", slo)
            return self._measure_loads(
                handle, prompts, params, slo, min(rates), lambda measurement: measurement.measure_curve(rates)
            )

    def max_load(
        self,
        work: Callable[..., Any],
        prompts: Sequence[str],
        /,
        *,
        slo: Slo,
        between: tuple[float, float],
        tolerance: float = 0.05,
        budget: float = MAX_LOAD_BUDGET_S,
        **params: Any,
    ) -> LoadRun:
        """Search for the highest request rate at which a served load is within its SLO.

        The search measures each rate with one to three rounds, round k with the arrivals of seed + k. A load
        ends as soon as it is certain to miss the SLO. Then the maximum is measured as a test would be, with
        its rounds (three at least, or two long ones), target and budget, and these are the test's rounds and
        metrics.
        If it is then not within the SLO, the search goes on below it, up to three times. Without a maximum,
        the test has the rounds of the lowest rate that was measured.

        Args:
            work: ``backend.serve``.
            prompts: Prompts, used in turn.
            slo: Limits of the latencies.
            between: Lowest and highest request rate (requests per second).
            tolerance: Relative error that the result may have. The search ends when the lowest rate outside
                the SLO is at most half of it above the result.
            budget: Seconds after which the search ends, except for the measurement of the maximum.
            **params: Further parameters of ``serve``. ``num_requests`` is the length of each load; by
                default, it is chosen so that a load above capacity by ``tolerance`` exceeds the SLO; with
                fewer, the result may be further above capacity. Loads without a steady state get more.

        Returns:
            The points, and the rounds and metrics at the maximum. ``max_load_requests_per_s`` has a value if
            a rate within the SLO and a rate outside were found.

        Raises:
            LLEnergyError: As for ``energy(...)``, or an argument is invalid.
            MeterError: As for ``energy(...)``.
        """
        __tracebackhide__ = True
        with self._errors_recorded():
            handle = backend_of("max_load", work, prompts, params)
            search = LoadSearch.between(between, tolerance)
            check_slo("max_load", slo)
            if not is_number(budget) or not budget:
                raise PlanError(f"max_load: budget is {budget!r}, needs a finite number of seconds above 0")
            return self._measure_loads(
                handle,
                prompts,
                params,
                slo,
                search.low,
                lambda measurement: measurement.search(search, budget),
            )

    def _measure_loads(
        self,
        handle: BackendHandle,
        prompts: Sequence[str],
        params: dict[str, Any],
        slo: Slo | None,
        lowest: float,
        run: Callable[[LoadMeasurement], None],
    ) -> LoadRun:
        __tracebackhide__ = True
        context = self._context
        plan = self._planned(plan_rounds(context.settings, self._options()))
        progress = context.state.progress.track(context.node_id)
        with raise_rank_outcomes(), progress as show, context.lock:
            if context.settings.disable:
                handle.workload(SERVE, prompts, {**params, "slo": slo, "request_rate": lowest}).run_round()
                return DisabledRun(None)
            measurement = LoadMeasurement(context, handle, prompts, params, slo, plan, show)
            run(measurement)
            experiment, curve = context.draft.experiment, context.draft.load_curve
            assert experiment is not None
            assert curve is not None
            experiment = self._complete(experiment, plan, lambda: Flops.unknown(LOADS_FLOPS_REASON))
        return LoadRun(experiment.rounds, experiment.metrics, None, curve)

    def _planned(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan of this session, and check that the test has not measured before."""
        if self._context.draft.experiment is not None:
            raise LLEnergyError(
                "energy() was called twice in one test; parametrize the test, or use energy_meter(name) for "
                "several windows"
            )
        if not self._context.state.is_ab_session:
            return plan
        # Its stages count rounds.
        return replace(plan, rounds=self._context.settings.rounds or plan.rounds, floor=None)

    @contextmanager
    def _errors_recorded(self) -> Iterator[None]:
        """Record that a call of ``energy`` raised: the test may expect that and end without any energy."""
        try:
            yield
        except BaseException as error:
            self._context.draft.refusal = ENERGY_RAISED.format(error=type(error).__name__)
            raise

    def score(self, references: Sequence[object], scorer: Scorer | str = "exact_match") -> float:
        """Score the outputs of the measured call: adds the metrics ``accuracy`` and ``accuracy_per_joule``.

        Args:
            references: What each output should be, in the order of the prompts; of a list or tuple of them
                for one output, the best counts.
            scorer: A function of an output and a reference that returns a number from 0 to 1,
                ``"exact_match"``, which ignores white space around both, or ``"lm_eval:NAME"`` for a metric
                of lm-eval, such as ``"lm_eval:exact_match"``.

        Returns:
            The accuracy, the mean score of the outputs.

        Raises:
            LLEnergyError: Nothing was measured, the call returned no texts, the references do not fit, or
                there is no such scorer.
        """
        __tracebackhide__ = True
        draft = self._context.draft
        texts = getattr(draft.result, "texts", None)
        if not isinstance(texts, list):
            raise LLEnergyError("score: call energy(backend.generate, ...) first: only its texts have scores")
        return draft.add_scores(score_outputs(texts, references, scorer))

    def _measure(self, plan: RoundPlan, work: Callable[..., Any] | Call, arguments: Arguments) -> Run:
        __tracebackhide__ = True
        context = self._context
        draft = context.draft
        plan = self._planned(plan)
        # Open the meters before the model, which may load for minutes: a requested meter may be missing.
        hosts = [] if context.settings.disable else open_host_meters(context)
        progress = context.state.progress.track(context.node_id)
        with raise_rank_outcomes(), progress as show, ExitStack() as locked:
            locked.enter_context(context.lock)
            begin_s = time.monotonic()
            try:
                show(_describe_preparation(work))
                workload, result = self._workload(work, arguments)
            except BaseException:
                close_all(hosts)
                raise
            if isinstance(workload, CallWorkload):
                # It runs in this process. Its threads may use the ranks, for which they need the lock.
                draft.forget_ranks()
                locked.close()
            if context.settings.disable:
                workload.prepare_round()
                workload.work()
                workload.timeline()
                draft.result = result()
                return DisabledRun(draft.result)
            load_s = time.monotonic() - begin_s
            slo = workload.slo if isinstance(workload, RankWorkload) else None
            draft.experiment = measure_on_hosts(
                workload,
                plan,
                hosts,
                lambda step: show(describe_step(step)),
                load_s,
                slo,
                on_failure=draft.keep_unfinished,
            )
            if isinstance(workload, RankWorkload):
                draft.rank_peak_memory_bytes = workload.rank_peak_memory_bytes
            value = draft.result = result()
            is_greedy = draft.backend is not None and draft.backend.generation.get("do_sample") is False
            if is_greedy and isinstance(value, Generation):
                draft.outputs = digest_outputs(encode_inputs(arguments.args[0]), value.token_ids)

            def count_flops() -> Flops:
                if not isinstance(workload, RankWorkload):
                    return Flops.unknown(FUNCTION_FLOPS_REASON)
                show("counting floating-point operations")
                return workload.flops()

            # Last, since counting may load, compile or cache something that would change a later round.
            experiment = self._complete(draft.experiment, plan, count_flops)
        return Run(experiment.rounds, experiment.metrics, value)

    def _complete(
        self, experiment: Experiment, plan: RoundPlan, count_flops: Callable[[], Flops]
    ) -> Experiment:
        """Add the metrics that options and marks ask for to a measurement, and record it."""
        context = self._context
        if context.settings.flops:
            experiment = _with_flops(experiment, count_flops(), context)
        if context.plan.device_roles:
            experiment = _with_roles(experiment, context, plan.rounds)
        if context.settings.rates is not None:
            metrics = context.settings.rates.derive(experiment.metrics)
            experiment = replace(experiment, metrics=metrics)
        context.draft.experiment = experiment
        return experiment

    def _workload(
        self, work: Callable[..., Any] | Call, arguments: Arguments
    ) -> tuple[RankWorkload | CallWorkload, Callable[[], Any]]:
        """Return the workload, and a function that returns its result."""
        args, kwargs, tokens = arguments.args, arguments.kwargs, arguments.tokens
        handle = getattr(work, "__self__", None)
        task = handle.task_of(work) if isinstance(handle, BackendHandle) else None
        if isinstance(work, Call) and (args or kwargs):
            raise LLEnergyError("energy(workers.call(fn, ...)): pass the arguments to call, not to energy")
        in_ranks = self._context.plan.gpus is not None
        if in_ranks and task is None and not isinstance(work, Call) and callable(work):
            work = Workers(self._context).call(work, *args, **kwargs)
        if task is not None or isinstance(work, Call):
            arguments.check_for_ranks()
        if isinstance(handle, BackendHandle) and task is not None:
            if given := tokens.given():
                raise LLEnergyError(
                    f"energy(backend.{task.name}, ...): leave out {' and '.join(given)}, since a backend "
                    "counts its own tokens"
                )
            ranks = handle.workload(task, *_inputs(*args, **kwargs))
            return ranks, lambda: task.result.merge(ranks.results())
        if isinstance(work, Call):
            ranks = work.workload(tokens.checked(work.function, work.args, work.kwargs))
            return ranks, lambda: found[0] if len(found := ranks.results()) == 1 else found
        if not callable(work):
            raise LLEnergyError(f"energy: {work!r} is not callable; pass the function, not its result")
        if is_lazy(work):
            raise LLEnergyError(f"energy: {REFUSAL}, or use async with energy_meter(name)")
        counter = TokenCounter(work, tokens.checked(work, args, kwargs))
        function = counter.keeping(work)

        def prepare() -> None:
            __tracebackhide__ = True
            nonlocal args, kwargs
            args, kwargs = arguments.prepare()

        def call() -> Any:
            __tracebackhide__ = True
            return function(*args, **kwargs)

        local = CallWorkload(call, prepare, arguments.clean_up, counter.count)
        return local, lambda: check_finished(local.result, "energy")


def _describe_preparation(work: Callable[..., Any] | Call) -> str:
    handle = getattr(work, "__self__", None)
    if isinstance(handle, BackendHandle):
        return f"loading {handle.model.label} with {handle.name}"
    return "preparing"


def _with_flops(experiment: Experiment, flops: Flops, context: TestContext) -> Experiment:
    counted = flops_metrics(experiment.metrics["energy_j"], flops)
    lease, backend = context.lease, context.draft.backend
    counted["mfu"] = utilization(
        counted["flops"],
        experiment.metrics["duration_s"],
        len(lease.devices),
        context.settings.peak_flops,
        peak_flops(lease.boards, backend.dtype if backend is not None else None),
    )
    return replace(experiment, metrics={**experiment.metrics, **counted})


def _with_roles(experiment: Experiment, context: TestContext, planned: int) -> Experiment:
    context.draft.device_roles = dict(context.plan.device_roles or {})
    coverage = min((meter.coverage for meter in experiment.meters), default=1.0)
    devices = context.lease.devices
    found = role_metrics(experiment.rounds, context.draft.device_roles, devices, coverage, planned)
    return replace(experiment, metrics={**experiment.metrics, **found})


def _inputs(inputs: Any, /, **params: Any) -> tuple[Any, dict[str, Any]]:
    return inputs, params
