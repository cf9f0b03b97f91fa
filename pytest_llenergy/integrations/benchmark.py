# SPDX-License-Identifier: Apache-2.0
"""Measure tests that use pytest-benchmark's fixture."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import pytest

from pytest_llenergy import marks
from pytest_llenergy.api import Place, open_for
from pytest_llenergy.export import benchmark_extra_info
from pytest_llenergy.measure.foreign_rounds import ForeignRounds, measure_foreign_rounds
from pytest_llenergy.options import settings_of
from pytest_llenergy.plan import has_mark
from pytest_llenergy.stash import LEASE, MEASURING, PLACE
from pytest_llenergy.xdist import is_worker

# Tests that use the fixture ``benchmark`` of pytest-benchmark are measured too, as they are.
#
# A plugin object that is registered only in a run that keeps what it measures, or for a test with a gate.

#: The fixture, and pytest-benchmark as it is registered.
FIXTURE = PLUGIN = "benchmark"

NOT_CALLED = "the test asks for the fixture benchmark and has not called it"
OFF_IN_WORKERS = (
    "pytest-benchmark turns itself off under pytest-xdist, and the test ran once, untimed; benchmarks are "
    "measured in a run without workers (-n0)"
)
OF_CODSPEED = (
    "the fixture benchmark is that of pytest-codspeed, which does not tell when its rounds run; without "
    "--codspeed and with pytest-benchmark installed the test is measured"
)


class Benchmarks:
    """Gives the tests a lease, and lets the fixture tell of its rounds."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that says nothing of devices has those of this process: that is where its code runs.

        It has them before anything is set up for it.
        """
        names = getattr(item, "fixturenames", ())
        asks = FIXTURE in names and PLACE not in names
        if asks and self._runs and self._measures(item) and _names_it(item):
            from pytest_llenergy.recorder import draft_of
            from pytest_llenergy.session import lease_first

            draft_of(item).runs_here = True
            if isinstance(item, pytest.Function):
                lease_first(item, LEASE)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Watch the fixture, once it is there."""
        made = yield
        if fixturedef.argname == FIXTURE and isinstance(request.node, pytest.Item):
            self._watch(made, request)
        return made

    def _watch(self, made: object, request: pytest.FixtureRequest) -> None:
        item = request.node
        if not self._measures(item) or MEASURING in item.fixturenames:
            return
        named = _names_it(item)
        # That package has no types, and need not be installed.
        if _is_pytest_benchmarks(made) and made.enabled:  # type: ignore[attr-defined]
            if named:
                self._place(request)
            watch(made, partial(self._place, request))
        elif not named:
            return
        elif type(made).__module__.partition(".")[0] == "pytest_codspeed":
            self._note(request, OF_CODSPEED)
        elif _is_pytest_benchmarks(made) and is_worker(self._config) and self._asked:
            self._note(request, OFF_IN_WORKERS)

    def _place(self, request: pytest.FixtureRequest) -> Place:
        """Where the test measures. From now on it has a record, and devices if it had none."""
        from pytest_llenergy.recorder import draft_of

        self._note(request, NOT_CALLED)
        if PLACE not in request.node.fixturenames:
            draft_of(request.node).runs_here = True
        place: Place = request.getfixturevalue(PLACE)
        return place

    def _note(self, request: pytest.FixtureRequest, unmeasured: str) -> None:
        """The test has a record from now on, with this reason until something is measured."""
        from pytest_llenergy.recorder import draft_of

        request.getfixturevalue(MEASURING)
        draft_of(request.node).unmeasured = unmeasured

    def _measures(self, item: pytest.Item) -> bool:
        """Whether somebody wants to know its joules."""
        return settings_of(self._config).keeps_something or has_mark(item, marks.energy_gate)

    @property
    def _runs(self) -> bool:
        """Whether benchmarks run; the fixture itself has the last word."""
        return self._asked and not is_worker(self._config)

    @property
    def _asked(self) -> bool:
        """Whether they are to run, by the options."""
        option = self._config.getoption
        disabled = option("benchmark_disable", False) and not option("benchmark_enable", False)
        skipped = option("benchmark_skip", False) and not option("benchmark_only", False)
        return bool(self._config.pluginmanager.has_plugin(PLUGIN)) and not (disabled or skipped)


def _names_it(item: pytest.Item) -> bool:
    """Whether the test wants the fixture: names it, also by way of others, or asks for it as it runs.

    One that has it only of a fixture for all tests (``autouse``) may know nothing of it.
    """
    if FIXTURE not in getattr(item, "fixturenames", ()) or has_mark(item, marks.energy_gate):
        return True
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return False
    wanted = [*info.argnames, *(name for mark in item.iter_markers("usefixtures") for name in mark.args)]
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += [asked for each in info.name2fixturedefs.get(name, ()) for asked in each.argnames]
    return FIXTURE in seen


def _is_pytest_benchmarks(made: object) -> bool:
    try:
        from pytest_benchmark.fixture import BenchmarkFixture
    except ImportError:
        return False
    # By its type: others may only say that they are one.
    return issubclass(type(made), BenchmarkFixture)


# The rounds of pytest-benchmark, as its fixture runs them.
#
# What is used of it are names that its own users use: calling the fixture, ``pedantic``, ``stats``, what that
# is told of each round (``update``), ``extra_info``. Rounds are noted where pytest-benchmark takes in what
# its timer said, after one has ended and before the next begins, so that nothing of this is in what it
# times.

#: Ends of rounds are noted no closer than this (nanoseconds), and the meters told.
EVERY_NS = 50_000_000

#: Timers that tell wall-clock time.
WALL_CLOCKS = (time.perf_counter, time.monotonic, time.time)

NOTHING_TOLD = "pytest-benchmark {version} did not tell of any round; this version is not known to work"

RAISED = "the benchmark raised {error}"


class UntoldError(Exception):
    """The fixture has run its work and said nothing of its rounds."""


class Rounds:
    """Notes when rounds end, from the moment at which the fixture has somewhere to put them."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self._stats: Any = None
        self._over = 0
        self._last_ns = 0
        self._ends: list[tuple[int, int]] = []
        self._begin_ns = time.monotonic_ns()

    def follow(self, stats: Any) -> None:
        """They are about to begin."""
        self._stats = stats
        update, between, clock, ends = stats.update, self._between, time.monotonic_ns, self._ends
        due_ns = over = 0

        def note(duration: float) -> None:
            nonlocal due_ns, over
            now_ns = self._last_ns = clock()
            over = self._over = over + 1
            update(duration)
            if now_ns >= due_ns:
                ends.append((over, now_ns))
                between()
                due_ns = now_ns + EVERY_NS

        stats.update = note
        between()
        self._begin_ns = clock()

    def told(self) -> ForeignRounds:
        """All of them. Raises ``UntoldError`` where there was none."""
        if not self._over:
            raise UntoldError
        if self._ends[-1][0] != self._over:
            self._ends.append((self._over, self._last_ns))
        iterations, timer = self._stats.iterations, self._stats.options.get("timer")
        return ForeignRounds(
            durations_s=[each * iterations for each in self._stats.stats.data],
            iterations=iterations,
            ends=self._ends,
            begin_ns=self._begin_ns,
            timer=None if timer in WALL_CLOCKS else getattr(timer, "__qualname__", repr(timer)),
        )


class Watched:
    """What the class of a fixture is given: the same calls, measured."""

    _llenergy_place: Callable[[], Place]
    _llenergy_rounds: Rounds | None = None
    _llenergy_used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``benchmark(function)``"""
        __tracebackhide__ = True
        return self._llenergy_measured(super().__call__, *args, **kwargs)  # type: ignore[misc]

    def pedantic(self, *args: Any, **kwargs: Any) -> Any:
        """``benchmark.pedantic(function, rounds=5)``"""
        __tracebackhide__ = True
        return self._llenergy_measured(super().pedantic, *args, **kwargs)  # type: ignore[misc]

    @property
    def stats(self) -> Any:
        """Set when all that comes before the rounds is over."""
        return vars(self).get("stats")

    @stats.setter
    def stats(self, value: Any) -> None:
        vars(self)["stats"] = value
        if self._llenergy_rounds is not None:
            self._llenergy_rounds.follow(value)

    def _llenergy_measured(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self._llenergy_used:
            # It refuses to be used twice, and says so.
            return call(*args, **kwargs)
        self._llenergy_used = True
        place, result = self._llenergy_place(), None
        place.check()
        settings, draft = place.settings, place.draft

        def work(between: Callable[[], None]) -> ForeignRounds:
            __tracebackhide__ = True
            nonlocal result
            self._llenergy_rounds = rounds = Rounds(between)
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                # Whatever it was, also what ends the run: noted, and raised again. The test may expect it.
                draft.unmeasured = RAISED.format(error=type(error).__name__)
                raise
            finally:
                self._llenergy_rounds = None
            return rounds.told()

        criterion = f"pytest-benchmark {version('pytest-benchmark')} chose rounds, iterations and warm-up"
        draft.forget_ranks()
        selection = open_for(place)
        try:
            draft.experiment = measure_foreign_rounds(
                work, criterion, settings.gap, settings.target, selection, place.lease
            )
        except UntoldError:
            draft.unmeasured = NOTHING_TOLD.format(version=version("pytest-benchmark"))
            return result
        for name, value in benchmark_extra_info(draft.experiment.metrics, draft.experiment.meters).items():
            # What the test itself says under such a name is its own.
            self.extra_info.setdefault(name, value)  # type: ignore[attr-defined]
        return result


def watch(fixture: Any, place: Callable[[], Place]) -> None:
    """Let a fixture of pytest-benchmark measure what it is called with, on the devices of the test.

    ``place`` is asked for them when it is called.
    """
    if isinstance(fixture, Watched):
        return
    fixture._llenergy_place = place
    kind: Any = type(fixture)
    fixture.__class__ = _watched(kind)


@cache
def _watched(kind: type) -> type:
    """Called as the class of the fixture is, in messages too."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Watched, kind), names)
