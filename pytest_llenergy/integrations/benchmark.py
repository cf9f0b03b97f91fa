# SPDX-License-Identifier: Apache-2.0
"""Tests that use the fixture ``benchmark`` of pytest-benchmark are measured too, as they are.

A plugin object that is registered only in a run that keeps what it measures, or for a test with a gate.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy import marks
from pytest_llenergy.errand import is_worker
from pytest_llenergy.marked import has_mark
from pytest_llenergy.options.settings import settings_of
from pytest_llenergy.process import LEASE, MEASURING, PLACE

if TYPE_CHECKING:
    from pytest_llenergy.handles import Place

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
            from pytest_llenergy.leasing import lease_first
            from pytest_llenergy.recorder import draft_of

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
            from pytest_llenergy.integrations.benchmark_rounds import watch

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
