# SPDX-License-Identifier: Apache-2.0
"""The rounds of pytest-benchmark, as its fixture runs them.

What is used of it are names that its own users use: calling the fixture, ``pedantic``, ``stats``, what that
is told of each round (``update``), ``extra_info``. Rounds are noted where pytest-benchmark takes in what its
timer said, after one has ended and before the next begins, so that nothing of this is in what it times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

from pytest_llenergy.export.sides import energy_figures
from pytest_llenergy.handles import Place
from pytest_llenergy.measure.beside import measure_beside
from pytest_llenergy.measure.own_rounds import OwnRounds
from pytest_llenergy.runs import open_for

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

    def told(self) -> OwnRounds:
        """All of them. Raises ``UntoldError`` where there was none."""
        if not self._over:
            raise UntoldError
        if self._ends[-1][0] != self._over:
            self._ends.append((self._over, self._last_ns))
        iterations, timer = self._stats.iterations, self._stats.options.get("timer")
        return OwnRounds(
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

        def work(between: Callable[[], None]) -> OwnRounds:
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
            draft.experiment = measure_beside(
                work, criterion, settings.gap, settings.target, selection, place.lease
            )
        except UntoldError:
            draft.unmeasured = NOTHING_TOLD.format(version=version("pytest-benchmark"))
            return result
        for name, value in energy_figures(draft.experiment.metrics, draft.experiment.meters).items():
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
