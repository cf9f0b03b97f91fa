# SPDX-License-Identifier: Apache-2.0
"""Measure tests that use the fixture ``benchmark`` of pytest-benchmark, unchanged.

This uses what users of pytest-benchmark use: calling the fixture, ``pedantic``, ``stats`` and ``extra_info``.
The method ``update`` of ``stats.stats``, which appends a duration to ``data``, is replaced by one that also
notes the end of the round, before the next begins, so that pytest-benchmark's times do not include it. After
the rounds, before it calls the function once more for its result, pytest-benchmark looks up ``cprofile``:
there the last reading is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import pytest

from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.foreign_meters import ForeignMeters
from pytest_llenergy.measure.foreign_rounds import ForeignRounds
from pytest_llenergy.measure.round_plan import least_gap_s
from pytest_llenergy.plugin.draft import draft_of
from pytest_llenergy.plugin.handles.context import TestContext, find_targets, open_test_meters
from pytest_llenergy.plugin.leasing import lease_first
from pytest_llenergy.plugin.plan import plan_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.stash import BENCHMARK, CONTEXT, MEASURING, is_worker, uses_fixture
from pytest_llenergy.record.base import Primitive
from pytest_llenergy.record.record import kind_of_energy

NOT_CALLED = "the fixture benchmark was not called, or is not that of pytest-benchmark"
OFF_IN_WORKERS = (
    "pytest-benchmark turns itself off under pytest-xdist, so the test ran once, untimed; benchmarks are "
    "measured in a run without workers (-n0)"
)
#: Set on a test whose meters are opened before its set-up.
PREPARES = pytest.StashKey[bool]()

#: Minimum time between two recorded ends of rounds, at which the meters are read (seconds).
EVERY_S = 0.05

#: Timers of wall-clock time.
WALL_CLOCKS = (time.perf_counter, time.monotonic, time.time)

OTHER_TIMER = (
    "the timer of pytest-benchmark, {timer}, may not measure wall-clock time, so that its rounds have no "
    "moments; use time.perf_counter"
)

NO_ROUNDS = "pytest-benchmark {version} reported no round; this version may be unsupported"

RAISED = "the benchmark raised {error}"

ON_HOSTS = (
    "benchmark measures the energy of pytest's own host, and the test uses others; use "
    "energy(workers.call(...)) instead"
)


class Benchmarks:
    """Plugin object that leases devices for benchmarks and measures them, in runs with a report or a gate."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._meters: ForeignMeters | None = None
        #: What the meters cover.
        self._metered: Targets | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        benchmark_only = uses_fixture(item, BENCHMARK) and not uses_fixture(item, CONTEXT)
        if benchmark_only and self._runs and self._measures(item):
            draft_of(item).in_process = True
            item.stash[PREPARES] = True
            if isinstance(item, pytest.Function):
                lease_first(item, CONTEXT)
        else:
            self._close_meters()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        __tracebackhide__ = True
        fixture = yield
        if fixturedef.argname == BENCHMARK and isinstance(request.node, pytest.Item):
            self._instrument(fixture, request)
        elif fixturedef.argname == CONTEXT and request.node.stash.get(PREPARES, False):
            # A meter that cannot be opened is an error of the call, if the test makes one.
            with suppress(LLEnergyError):
                self._open_meters(fixture)
        return fixture

    def pytest_sessionfinish(self) -> None:
        self._close_meters()

    def _open_meters(self, context: TestContext) -> ForeignMeters:
        """Return open meters for the devices of a test; those of the previous test, if they are the same."""
        metered = find_targets(context)
        if self._meters is None or metered != self._metered:
            self._close_meters()
            self._meters, self._metered = (
                ForeignMeters(context.lease, least_gap_s(context.settings.budget)),
                metered,
            )
        self._meters.prepare(partial(open_test_meters, context))
        return self._meters

    def _close_meters(self) -> None:
        if self._meters is not None:
            meters, self._meters = self._meters, None
            meters.close()

    def _instrument(self, fixture: Any, request: pytest.FixtureRequest) -> None:
        item = request.node
        if not (self._measures(item) and uses_fixture(item, BENCHMARK)) or uses_fixture(item, MEASURING):
            return
        if not _is_pytest_benchmarks(fixture):
            # A gate must not pass unchecked.
            if plan_of(item).gate is not None:
                self._start_record(request, NOT_CALLED)
        elif fixture.enabled:
            # Done now, since it would come between the test's own set-up and the first call.
            self._start_record(request, NOT_CALLED)
            context: TestContext = request.getfixturevalue(CONTEXT)
            if context.draft.gang is not None:
                raise PlanError(ON_HOSTS)
            instrument(fixture, context, self._open_meters)
        elif is_worker(self._config) and self._enabled:
            self._start_record(request, OFF_IN_WORKERS)

    def _start_record(self, request: pytest.FixtureRequest, unmeasured: str) -> None:
        """Start a record for the test, with a reason that applies until something is measured."""
        request.getfixturevalue(MEASURING)
        draft_of(request.node).unmeasured = unmeasured

    def _measures(self, item: pytest.Item) -> bool:
        """Whether the run or the test's gate uses the test's energy."""
        return settings_of(self._config).keeps_something or plan_of(item).gate is not None

    @property
    def _runs(self) -> bool:
        """Whether the options let benchmarks run; the fixture can still disable itself."""
        return self._enabled and not is_worker(self._config)

    @property
    def _enabled(self) -> bool:
        """Whether the options of pytest-benchmark enable benchmarks."""
        option = self._config.getoption
        disabled = option("benchmark_disable", False) and not option("benchmark_enable", False)
        skipped = option("benchmark_skip", False) and not option("benchmark_only", False)
        return bool(self._config.pluginmanager.has_plugin(BENCHMARK)) and not (disabled or skipped)


def _is_pytest_benchmarks(fixture: object) -> bool:
    try:
        from pytest_benchmark.fixture import BenchmarkFixture
    except ImportError:
        return False
    # ``isinstance`` would believe the ``__class__`` of a proxy.
    return issubclass(type(fixture), BenchmarkFixture)


class RoundClock:
    """Record when the rounds of a fixture end. The meters are read after a recorded end."""

    def __init__(self, meters: ForeignMeters, *, plain: bool) -> None:
        self._meters = meters
        self._plain = plain
        self._stats: Any = None
        #: Returns when the last round ended (monotonic seconds).
        self._last_s: Callable[[], float] = float
        self._ends: list[tuple[int, int]] = []
        self._begin_ns = time.monotonic_ns()

    def follow(self, stats: Any) -> None:
        """Record the end of each round that pytest-benchmark adds to ``stats`` from now on."""
        self._stats = stats
        data, between, clock, ends = stats.stats.data, self._meters.between, time.monotonic, self._ends
        append, due_s, last_s = data.append, 0.0, 0.0

        # Little more than the method that it replaces, and no objects but floats, which come from a free
        # list: an integer or an attribute here makes a next round of one microsecond a hundredth slower.
        def note(duration: float) -> None:
            nonlocal due_s, last_s
            append(duration)
            last_s = clock()
            if last_s >= due_s:
                ends.append((len(data), round(last_s * 1e9)))
                if last_s >= read_s:
                    between()
                due_s = last_s + EVERY_S

        stats.stats.update, self._last_s = note, lambda: last_s
        self._meters.begin()
        self._begin_ns = time.monotonic_ns()
        # Without set-up, the first round begins at the first reading.
        read_s = self._begin_ns / 1e9 + EVERY_S if self._plain else 0.0

    def end(self) -> None:
        """Read the meters, once the last round has ended."""
        if self._ends:
            self._meters.end()

    def to_rounds(self) -> ForeignRounds | str:
        """Return all rounds, or why their energy cannot be known."""
        if not self._ends:
            return NO_ROUNDS.format(version=_tool_version())
        timer = self._stats.options.get("timer")
        if timer not in WALL_CLOCKS:
            return OTHER_TIMER.format(timer=getattr(timer, "__qualname__", repr(timer)))
        count = len(self._stats.stats.data)
        if self._ends[-1][0] != count:
            self._ends.append((count, round(self._last_s() * 1e9)))
        iterations = self._stats.iterations
        return ForeignRounds(
            durations_s=[each * iterations for each in self._stats.stats.data],
            iterations=iterations,
            ends=self._ends,
            begin_ns=self._begin_ns,
            plain=self._plain,
        )


class Measured:
    """Mixin for the class of a fixture that measures its calls."""

    _llenergy_context: TestContext
    _llenergy_meters: Callable[[TestContext], ForeignMeters]
    _llenergy_rounds: RoundClock | None = None
    _llenergy_used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``benchmark(function)``"""
        __tracebackhide__ = True
        return self._llenergy_measured(super().__call__, True, *args, **kwargs)  # type: ignore[misc]

    def pedantic(self, *args: Any, **kwargs: Any) -> Any:
        """``benchmark.pedantic(function, rounds=5)``"""
        __tracebackhide__ = True
        # ``setup`` and ``teardown`` come fourth and fifth.
        plain = len(args) <= 3 and not (kwargs.get("setup") or kwargs.get("teardown"))
        return self._llenergy_measured(super().pedantic, plain, *args, **kwargs)  # type: ignore[misc]

    @property
    def stats(self) -> Any:
        """Set by pytest-benchmark just before the rounds."""
        return vars(self).get("stats")

    @stats.setter
    def stats(self, value: Any) -> None:
        vars(self)["stats"] = value
        if self._llenergy_rounds is not None:
            self._llenergy_rounds.follow(value)

    @property
    def cprofile(self) -> Any:
        """Looked up by pytest-benchmark just after the rounds."""
        if self._llenergy_rounds is not None:
            self._llenergy_rounds.end()
        return vars(self).get("cprofile")

    @cprofile.setter
    def cprofile(self, value: Any) -> None:
        vars(self)["cprofile"] = value

    def _llenergy_measured(self, call: Callable[..., Any], plain: bool, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self._llenergy_used:
            # pytest-benchmark raises an error for a second use.
            return call(*args, **kwargs)
        self._llenergy_used = True
        context = self._llenergy_context
        context.check_running()
        draft = context.draft
        meters = self._llenergy_meters(context)
        self._llenergy_rounds = rounds = RoundClock(meters, plain=plain)
        try:
            result = call(*args, **kwargs)
            rounds.end()
        except BaseException as error:
            # The test may expect any error; the record then has the reason.
            draft.unmeasured = RAISED.format(error=type(error).__name__)
            meters.abandon()
            raise
        finally:
            self._llenergy_rounds = None
        draft.forget_ranks()
        criterion = f"pytest-benchmark {_tool_version()} chose rounds, iterations and warm-up"
        found = rounds.to_rounds()
        if isinstance(found, str):
            draft.unmeasured = found
            meters.abandon()
            return result
        draft.experiment = meters.account(found, criterion, context.settings.target)
        for name, value in _extra_info(draft.experiment).items():
            # The test may have set a value of this name itself.
            self.extra_info.setdefault(name, value)  # type: ignore[attr-defined]
        return result


@cache
def _tool_version() -> str:
    return version("pytest-benchmark")


def _extra_info(experiment: Experiment) -> dict[str, Primitive]:
    """Return the energy of one iteration for ``extra_info``, or why it is unknown."""
    energy = experiment.metrics["energy_j"]
    if energy.value is None:
        return {"energy_reason": energy.reason}
    kind = kind_of_energy(experiment.meters, experiment.rounds)
    return {"energy_j": energy.value, "energy_u_j": energy.uncertainty, "energy_kind": kind}


def instrument(fixture: Any, context: TestContext, meters: Callable[[TestContext], ForeignMeters]) -> None:
    """Make a fixture of pytest-benchmark measure the energy of the functions that it runs.

    Args:
        fixture: The fixture, whose class is replaced.
        context: The context of the test.
        meters: Returns the open meters for a test.
    """
    if isinstance(fixture, Measured):
        return
    fixture._llenergy_context, fixture._llenergy_meters = context, meters
    kind: Any = type(fixture)
    fixture.__class__ = _measured_class(kind)


@cache
def _measured_class(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Measured, kind), names)
