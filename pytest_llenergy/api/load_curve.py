# SPDX-License-Identifier: Apache-2.0
"""Measure a served load at several rates: what ``energy.load_curve`` and ``energy.max_load`` do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.context import TestContext, open_host_meters
from pytest_llenergy.api.load_points import add_max_load, describe_failed, explain_cut, make_point
from pytest_llenergy.backends.tasks import SERVE, Probe
from pytest_llenergy.errors import BackendError, LLEnergyError, PlanError
from pytest_llenergy.measure.experiment import Experiment, measure_on_hosts
from pytest_llenergy.measure.goodput import has_flag, is_mostly
from pytest_llenergy.measure.host_meters import close_all
from pytest_llenergy.measure.load_probe import (
    MAX_PROBE_ROUNDS,
    TIMEOUT_SHARE,
    allowed_misses,
    check_length,
    check_requests,
    is_decided,
    probe_requests,
    probe_rounds,
    steady_requests,
)
from pytest_llenergy.measure.load_search import LoadSearch
from pytest_llenergy.measure.load_uncertainty import arrivals_uncertainty, lower_rate
from pytest_llenergy.measure.round_metric import is_valid
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.model.load_curve import LoadCurve, LoadPoint, Slo
from pytest_llenergy.model.record import Round
from pytest_llenergy.model.served import OUT_OF_TIME, SHORT_LOAD
from pytest_llenergy.progress import describe_step
from pytest_llenergy.traffic.requests import Request

#: Parameters of ``serve`` that the rates of a curve replace.
REPLACED = ("request_rate", "concurrency", "trace")

#: Reason in the record of a search until it ends.
UNFINISHED = "the search did not end"

#: Note on a maximum whose uncertainty does not include the arrivals.
THESE_ARRIVALS = "with these arrivals: its loads do not show how far the maximum of others may be"

#: Length of a load from which on the maximum has two rounds instead of three unless there is time (seconds).
LONG_LOAD_S = 30.0

#: End of a load without a budget.
FOREVER_NS = 2**62


def parse_rates(rates: Any) -> list[float]:
    """Check the rates of a curve.

    Raises:
        PlanError: They are not one or more different numbers above 0.
    """
    given = list(rates) if isinstance(rates, (list, tuple)) else []
    numbers = [rate for rate in given if isinstance(rate, (int, float)) and not isinstance(rate, bool)]
    if not given or len(numbers) < len(given) or not all(0 < rate < math.inf for rate in numbers):
        raise PlanError(
            f"load_curve: request_rates is {rates!r}, needs requests per second above 0, such as [1, 2, 4]"
        )
    if len(set(numbers)) < len(numbers):
        raise PlanError(f"load_curve: a rate of {rates!r} is given twice; keep one of them")
    return [float(rate) for rate in numbers]


def check_slo(what: str, slo: Any) -> None:
    """Check the limits of a load.

    Raises:
        PlanError: They are not those of ``pytest_llenergy.slo``.
    """
    if not isinstance(slo, Slo):
        raise PlanError(f"{what}: slo is {slo!r}, needs pytest_llenergy.slo(ttft=..., tpot=..., e2e=...)")


def backend_of(what: str, work: Any, prompts: Any, params: Mapping[str, Any]) -> BackendHandle:
    """Return the backend of ``backend.serve``.

    Raises:
        PlanError: It is other work, a parameter contradicts the rates, or a prompt has follow-ups.
    """
    handle = getattr(work, "__self__", None)
    if not isinstance(handle, BackendHandle):
        raise PlanError(f"{what}: needs backend.serve, found {work!r}")
    if handle.task_of(work) is not SERVE:
        raise PlanError(f"{what}: needs backend.serve, found backend.{work.__name__}")
    replaced = [name for name in REPLACED if name in params]
    if replaced or params.get("arrivals") == "trace":
        name = replaced[0] if replaced else "arrivals='trace'"
        raise PlanError(f"{what}: leave out {name}, because each load has another request rate")
    given = prompts if isinstance(prompts, (list, tuple)) else ()
    talks = sum(isinstance(each, Request) and bool(each.follow_ups) for each in given)
    if talks:
        # A rate is that of conversations, so that its requests per second depend on their turns.
        raise PlanError(
            f"{what}: {talks} of {len(given)} prompts have follow_ups, needs requests of one turn, because "
            "its rates are requests per second; parametrize the test by request_rate, which is that of "
            "conversations in energy(backend.serve, ...)"
        )
    return handle


@dataclass
class LoadMeasurement:
    """Measures the same load of one test at several rates, one after the other.

    Attributes:
        context: The test. Its draft gets each point as soon as it is measured.
        handle: The backend.
        prompts: Prompts, used in turn.
        params: Parameters of ``serve`` except the rate.
        slo: Limits of the latencies.
        plan: How a test is measured.
        show: Shows progress.
        between: Lowest and highest rate of a search.
        rates: The rates that the test asks for.
        points: Every point so far.
        experiments: The measurement of each point that has one, by its place.
    """

    context: TestContext
    handle: BackendHandle
    prompts: Sequence[str]
    params: dict[str, Any]
    slo: Slo | None
    plan: RoundPlan
    show: Callable[[str], None]
    between: tuple[float, float] | None = None
    rates: Sequence[float] = ()
    points: list[LoadPoint] = field(default_factory=list)
    experiments: dict[int, Experiment] = field(default_factory=dict)
    _begin_s: float = field(default_factory=time.monotonic)
    #: When the budget of a search is spent (monotonic nanoseconds).
    _end_ns: int = 0
    #: Shortest load that has a steady state, as far as is known (seconds).
    _steady_s: float = 0.0

    def measure_curve(self, rates: Sequence[float]) -> None:
        """Measure each rate as a test of its own, without a warm-up after the first."""
        self.rates = rates
        for number, rate in enumerate(rates, 1):
            plan = self.plan if number == 1 else replace(self.plan, warmup=0)
            self._measure(rate, replace(plan, iterations=1), f"load {number} of {len(rates)}")
        best = [each for each in self.points if each.within_slo]
        # The highest load that the server sustains, otherwise the lowest.
        chosen = max(best, key=_rate) if best else min(self.points, key=_rate)
        self._finish(self.points.index(chosen), None)

    def search(self, search: LoadSearch, budget_s: float) -> None:
        """Search for the maximum load within the SLO, and measure it as a test of its own.

        Raises:
            PlanError: Loads that decide do not fit into the time limits.
        """
        slo, given = self.slo, self.params.get("num_requests")
        assert slo is not None
        self.handle.parse(SERVE, self.prompts, {**self.params, "slo": slo, "request_rate": search.high})
        check_requests(given, slo)
        if given is None:
            check_length(slo, search.tolerance, budget_s, self.context.settings.timeout, search.steps)
        self.rates = self.between = search.low, search.high
        numbers = iter(range(1, 1000))
        self._end_ns = min(FOREVER_NS, time.monotonic_ns() + round(budget_s * 1e9))

        def measure(rate: float, title: str, *, in_full: bool) -> bool | None:
            within, why = self._search_rate(search, rate, title, in_full=in_full)
            search.stopped = why or search.stopped
            return within

        def probe(rate: float) -> bool | None:
            return measure(rate, f"load {next(numbers)} of about {search.steps}", in_full=False)

        search.run(
            probe,
            lambda rate: measure(rate, "maximum load", in_full=True),
            lambda: time.monotonic() - self._begin_s < budget_s,
            f"the search ended after its budget of {budget_s:g} s; raise budget=, or narrow between=",
        )
        if not self.points:
            raise PlanError(f"max_load: {search.stopped}")
        self._measure_rise(search)
        rates = [point.request_rate for point in self.points]
        chosen = search.maximum or min(rates)
        # Measured last of all at this rate, which is the full measurement.
        self._finish(max(place for place, rate in enumerate(rates) if rate == chosen), search)

    def _search_rate(
        self, search: LoadSearch, rate: float, title: str, *, in_full: bool
    ) -> tuple[bool | None, str | None]:
        """Measure a rate of a search, again with more requests while it has no steady state.

        Returns:
            Whether it is within the SLO; None without a result. Then also the reason, unless it is the
            search's budget.

        Raises:
            BackendError: It has no valid round, or the server refuses it and has not held any rate.
        """
        slo, timeout_s = self.slo, self.context.settings.timeout
        assert slo is not None
        while time.monotonic_ns() < self._end_ns or in_full:
            requests = self.params.get("num_requests") or probe_requests(rate, slo, search.tolerance)
            requests = max(requests, math.ceil(rate * self._steady_s))
            length_s = requests / rate
            if length_s > TIMEOUT_SHARE * timeout_s:
                return None, (
                    f"a load of {requests} requests at {rate:.3g} request/s takes {length_s:.0f} s, more "
                    f"than nine tenths of --energy-timeout={timeout_s:g}; raise it, or search higher rates"
                )
            needed = probe_rounds(requests, slo)
            plan, is_enough = replace(self.plan, iterations=1), None
            if in_full:
                rounds = max(plan.rounds, MAX_PROBE_ROUNDS)
                least = max(plan.least, MAX_PROBE_ROUNDS) if length_s <= LONG_LOAD_S else max(needed, 2)
                plan, needed = replace(plan, rounds=rounds, floor=least, warmup=0), rounds
            else:
                warmup = 1 if plan.warmup is None else plan.warmup
                plan = replace(plan, rounds=1, warmup=0 if self.points else warmup, floor=None)
                is_enough = partial(is_decided, slo=slo, needed=needed)
            probe = Probe(
                warmups=plan.warmup or 0,
                allowed=allowed_misses(needed * requests, slo),
                requests=needed * requests,
                end_ns=FOREVER_NS if in_full else self._end_ns,
                longest_s=TIMEOUT_SHARE * timeout_s,
            )
            self._measure(rate, plan, title, requests, is_enough, probe)
            found = self.experiments[len(self.points) - 1].rounds
            if not is_mostly(SHORT_LOAD, [each for each in found if is_valid(each)]):
                point = self.points[-1]
                out_of_time = any(has_flag(each, OUT_OF_TIME) for each in found)
                if (point.within_slo is None and not out_of_time) or (point.refused and not search.held):
                    more = "raise" if self.params.get("max_failures") else "set"
                    advice = (
                        f"; {more} max_failures, or search lower rates (between=)" if point.refused else ""
                    )
                    raise BackendError(f"max_load: the load of {rate:.3g} request/s: {point.reason}{advice}")
                if point.within_slo is None and (in_full or time.monotonic_ns() < self._end_ns):
                    return None, (
                        f"a load of {requests} requests at {rate:.3g} request/s did not end within nine "
                        f"tenths of --energy-timeout={timeout_s:g}; raise it"
                    )
                return point.within_slo, None
            # It decides nothing, and neither would loads as short at other rates.
            self._steady_s = steady_requests(found, rate, requests) / rate
        return None, None

    def _measure_rise(self, search: LoadSearch) -> None:
        """Measure a rate below the maximum if the uncertainty needs it and there is time."""
        if search.maximum is None or search.exceeded is None or time.monotonic_ns() >= self._end_ns:
            return
        rate = lower_rate(search.maximum, (each.request_rate for each in self.points if each.within_slo))
        if rate is None:
            return
        # The maximum is known without it, and the point has the error.
        with suppress(LLEnergyError):
            within, _ = self._search_rate(search, rate, "load below the maximum", in_full=False)
            if within is False:
                search.doubted = rate

    def _measure(
        self,
        rate: float,
        plan: RoundPlan,
        title: str,
        num_requests: int | None = None,
        is_enough: Callable[[Sequence[Round]], bool] | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Measure one rate, and keep the point whatever happens later."""
        __tracebackhide__ = True
        context = self.context
        title = f"{title}, {rate:.3g} request/s"
        self.show(title)
        begin_s = time.monotonic()
        # Opened before the model, which may load for minutes.
        hosts = open_host_meters(context)
        size = {} if num_requests is None else {"num_requests": num_requests}
        params = {**self.params, "slo": self.slo, **size, "request_rate": rate}
        try:
            workload = self.handle.workload(SERVE, self.prompts, params, probe)
        except BaseException:
            close_all(hosts)
            raise
        load_s = time.monotonic() - begin_s
        try:
            experiment = measure_on_hosts(
                workload,
                plan,
                hosts,
                lambda step: self.show(f"{title}: {describe_step(step)}"),
                load_s,
                self.slo,
                is_enough,
                context.draft.keep_unfinished,
            )
        except Exception as error:
            self._keep(LoadPoint(request_rate=rate, reason=f"{type(error).__name__}: {error}"), None)
            raise
        context.draft.rank_peak_memory_bytes = workload.rank_peak_memory_bytes
        experiment = explain_cut(experiment)
        self._keep(make_point(rate, experiment, self.slo, num_requests), experiment)

    def _keep(self, point: LoadPoint, experiment: Experiment | None) -> None:
        draft = self.context.draft
        if experiment is not None:
            self.experiments[len(self.points)] = draft.experiment = experiment
        self.points.append(point)
        reason = UNFINISHED if self.between is not None else None
        draft.load_curve = LoadCurve(
            points=list(self.points), slo=self.slo, between=self.between, reason=reason
        )
        self._describe_load()

    def _describe_load(self) -> None:
        """Record the rates that the test asks for: those that a search measures differ from run to run."""
        draft = self.context.draft
        if draft.backend is None:
            return
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        asked = {
            "request_rate": f"maximum from {rates}" if self.between is not None else rates,
            "num_requests": self.params.get("num_requests"),
        }
        generation = {**draft.backend.generation, **asked}
        draft.backend = msgspec.structs.replace(draft.backend, generation=generation)

    def _finish(self, place: int, search: LoadSearch | None) -> None:
        """Give the test's record the rounds of one point, and the result of the search."""
        draft, experiment = self.context.draft, self.experiments[place]
        assert draft.load_curve is not None
        if search is not None:
            u, u_arrivals = search.uncertainty, self._arrivals_uncertainty(place, search)
            ended = search.describe_end()
            failed = describe_failed(experiment.rounds) if search.maximum is None else None
            if failed is not None:
                # Which may be why the load of the record, that of the lowest rate, missed the SLO.
                ended = f"{ended}; at {self.points[place].request_rate:.3g} request/s {failed}"
            draft.load_curve = msgspec.structs.replace(
                draft.load_curve,
                max_load_requests_per_s=search.maximum,
                max_load_u_requests_per_s=math.hypot(u, u_arrivals or 0.0) if u is not None else None,
                exceeded_at_requests_per_s=search.exceeded if search.maximum is not None else None,
                reason=ended or (THESE_ARRIVALS if u is not None and u_arrivals is None else None),
            )
            experiment = add_max_load(experiment, draft.load_curve, u, u_arrivals)
        times = experiment.times
        if times is not None:
            own_s = times.load_s + times.warmup_s + times.rounds_s + times.gaps_s
            others_s = max(0.0, time.monotonic() - self._begin_s - own_s)
            times = msgspec.structs.replace(times, other_loads_s=others_s)
        draft.experiment = replace(experiment, times=times)

    def _arrivals_uncertainty(self, place: int, search: LoadSearch) -> float | None:
        if search.maximum is None or self.slo is None:
            return None
        measured = [(self.points[number], each.rounds) for number, each in self.experiments.items()]
        lower = {point.request_rate: rounds for point, rounds in measured if point.within_slo}
        exceeding = {point.request_rate: rounds for point, rounds in measured}.get(search.exceeded or 0.0, ())
        rounds = self.experiments[place].rounds
        return arrivals_uncertainty(search.maximum, rounds, lower, self.slo, search.tolerance, exceeding)


def _rate(point: LoadPoint) -> float:
    return point.request_rate
