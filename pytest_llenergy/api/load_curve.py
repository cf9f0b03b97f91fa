# SPDX-License-Identifier: Apache-2.0
"""Measure a served load at several rates: what ``energy.load_curve`` and ``energy.max_load`` do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pytest_llenergy.api.backend_handle import BackendHandle
from pytest_llenergy.api.context import TestContext, open_host_meters
from pytest_llenergy.backends.tasks import SERVE
from pytest_llenergy.errors import BackendError, PlanError, ServerError
from pytest_llenergy.measure.experiment import Experiment, measure_on_hosts
from pytest_llenergy.measure.goodput import attainment, good_requests, is_saturated
from pytest_llenergy.measure.host_meters import close_all
from pytest_llenergy.measure.load_search import (
    MAX_PROBE_ROUNDS,
    LoadSearch,
    is_decided,
    is_within,
    probe_requests,
)
from pytest_llenergy.measure.round_metric import is_valid
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.round_statistics import percentile
from pytest_llenergy.model.load_curve import LoadCurve, LoadPoint, MaxLoad, Slo
from pytest_llenergy.model.record import Metric, Round
from pytest_llenergy.progress import describe_step
from pytest_llenergy.traffic.requests import Request

#: Parameters of ``serve`` that the rates of a curve replace.
REPLACED = ("request_rate", "concurrency", "trace")

#: Reason in the record of a search until it ends.
UNFINISHED = "the search did not end"

#: Latencies of a point: its columns, and those of ``ServedRequests``.
LATENCIES = {
    "time_to_first_token": "time_to_first_token_s",
    "time_per_output_token": "time_per_output_token_s",
    "end_to_end_latency": "end_to_end_latency_s",
}


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
        """Search for the maximum load within the SLO, and measure it as a test of its own."""
        slo, num_requests = self.slo, self.params.get("num_requests")
        assert slo is not None
        self.rates = self.between = search.low, search.high
        numbers = iter(range(1, 1000))

        def size(rate: float) -> dict[str, Any]:
            return {"num_requests": num_requests or probe_requests(rate, slo, search.tolerance)}

        def probe(rate: float) -> bool:
            number = next(numbers)
            warmup = 1 if number == 1 and self.plan.warmup is None else 0
            plan = replace(self.plan, rounds=1, iterations=1, warmup=warmup, floor=None)
            title = f"load {number} of about {search.steps}"
            try:
                self._measure(rate, plan, title, size(rate), lambda rounds: is_decided(rounds, slo))
            except ServerError:
                raise
            except BackendError:
                if search.maximum is None:
                    raise
                # The server works, and refuses this load: the point holds the reason.
                return False
            return self._is_within(self.points[-1])

        def confirm(rate: float) -> bool:
            rounds, least = (max(each, MAX_PROBE_ROUNDS) for each in (self.plan.rounds, self.plan.least))
            plan = replace(self.plan, rounds=rounds, floor=least, iterations=1, warmup=0)
            self._measure(rate, plan, "maximum load", size(rate))
            return self._is_within(self.points[-1])

        search.run(
            probe,
            confirm,
            lambda: time.monotonic() - self._begin_s < budget_s,
            f"the search ended after its budget of {budget_s:g} s",
        )
        rates = [each.request_rate for each in self.points]
        # Measured last of all at this rate, which is the full measurement.
        place = len(rates) - 1 - rates[::-1].index(search.maximum or min(rates))
        self._finish(place, search)

    def _is_within(self, point: LoadPoint) -> bool:
        if point.within_slo is None:
            raise BackendError(f"max_load: the load of {point.request_rate:.3g} request/s: {point.reason}")
        return point.within_slo

    def _measure(
        self,
        rate: float,
        plan: RoundPlan,
        title: str,
        size: dict[str, Any] | None = None,
        is_enough: Callable[[Sequence[Round]], bool] | None = None,
    ) -> None:
        """Measure one rate, and keep the point whatever happens later."""
        __tracebackhide__ = True
        context = self.context
        title = f"{title}, {rate:.3g} request/s"
        self.show(title)
        begin_s = time.monotonic()
        # Opened before the model, which may load for minutes.
        hosts = open_host_meters(context)
        params = {**self.params, "slo": self.slo, **(size or {}), "request_rate": rate}
        try:
            workload = self.handle.workload(SERVE, self.prompts, params)
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
        self._keep(make_point(rate, experiment, self.slo), experiment)

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
            draft.load_curve = msgspec.structs.replace(
                draft.load_curve,
                max_load_requests_per_s=search.maximum,
                exceeded_at_requests_per_s=search.exceeded if search.maximum is not None else None,
                reason=search.describe_end(),
            )
            experiment = add_max_load(experiment, draft.load_curve)
        times = experiment.times
        if times is not None:
            own_s = times.load_s + times.warmup_s + times.rounds_s + times.gaps_s
            others_s = max(0.0, time.monotonic() - self._begin_s - own_s)
            times = msgspec.structs.replace(times, other_loads_s=others_s)
        draft.experiment = replace(experiment, times=times)


def make_point(rate: float, experiment: Experiment, slo: Slo | None) -> LoadPoint:
    """Return the point of a measured load on the curve."""
    rounds = [round_ for round_ in experiment.rounds if is_valid(round_)]
    metrics = experiment.metrics
    per_token = metrics.get("energy_per_output_token_j")
    served = [round_.served for round_ in rounds if round_.served is not None]
    # All figures of requests are over those of all rounds, so that none contradicts another.
    seconds = sum(round_.duration_s for round_ in rounds)
    good = [count for round_ in rounds if (count := good_requests(round_)) is not None]
    latencies: dict[str, float] = {}
    for name, column in LATENCIES.items():
        known = [each for part in served for each in getattr(part, column) if each is not None]
        if known:
            latencies |= {f"{name}_p{percent}_s": percentile(known, percent) for percent in (50, 99)}
    first = experiment.rounds[0].served
    return LoadPoint(
        request_rate=rate,
        requests=len(first.sent_s) + len(first.failures) if first is not None else 0,
        rounds=len(rounds),
        requests_per_s=sum(len(part.sent_s) for part in served) / seconds if seconds else None,
        energy_per_output_token_j=per_token.value if per_token is not None else None,
        energy_per_output_token_u_j=per_token.uncertainty if per_token is not None else None,
        slo_attainment=attainment(*rounds),
        goodput_requests_per_s=sum(good) / seconds if good and seconds else None,
        saturated=is_saturated(rounds),
        within_slo=is_within(experiment.rounds, slo),
        reason=per_token.reason if per_token is not None and per_token.value is None else None,
        **latencies,
    )


def add_max_load(experiment: Experiment, curve: LoadCurve) -> Experiment:
    """Add the result of a search to the rounds and metrics of the measurement that ended it.

    The maximum lies between the highest rate that holds and the lowest that exceeds the SLO. The value is the
    former; its standard uncertainty is that of a rectangular distribution up to the latter.
    """
    found, above = curve.max_load_requests_per_s, curve.exceeded_at_requests_per_s
    name = "max_load_requests_per_s"
    if found is None and curve.between is not None:
        low = curve.between[0]
        exceeded = any(each.request_rate == low and each.within_slo is False for each in curve.points)
        above = low if exceeded else None
    bounds = MaxLoad(at_least_requests_per_s=found, below_requests_per_s=above, reason=curve.reason)
    metric = Metric(value=None, unit="request/s", reason=curve.reason)
    if found is not None and above is not None:
        u = (above - found) / math.sqrt(3)
        bounds = msgspec.structs.replace(bounds, requests_per_s=found, u_requests_per_s=u)
        n = sum(map(is_valid, experiment.rounds))
        metric = msgspec.structs.replace(metric, value=found, uncertainty=u, uncertainty_absolute=u, n=n)
    rounds = [msgspec.structs.replace(round_, max_load=bounds) for round_ in experiment.rounds]
    return replace(experiment, rounds=rounds, metrics={**experiment.metrics, name: metric})


def _rate(point: LoadPoint) -> float:
    return point.request_rate
