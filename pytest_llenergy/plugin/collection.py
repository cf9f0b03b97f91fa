# SPDX-License-Identifier: Apache-2.0
"""Parametrise tests over backends; check at collection that every mark has an effect."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import pytest

from pytest_llenergy.backends.registry import explain_unmet, explain_unmet_by_all
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin import marks
from pytest_llenergy.plugin.fixtures import SKIPPED, gpus
from pytest_llenergy.plugin.interruption import RecordSender
from pytest_llenergy.plugin.leasing import gpu_settings_of, lease_devices, lease_first
from pytest_llenergy.plugin.plan import (
    TestPlan,
    freeze_plan,
    parse_plan,
    plan_of,
    runs_in_ranks,
    valid_plan_of,
)
from pytest_llenergy.plugin.recorder import start_record
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.stash import (
    BACKEND_PARAMETER,
    ENERGY,
    LEASE,
    MEASURING,
    is_measured,
    is_worker,
    uses_energy,
    uses_fixture,
)
from pytest_llenergy.plugin.xdist import worker_input_of
from pytest_llenergy.ranks.plan import explain_degree_mismatch

#: Plugins that have a fixture ``benchmark``, and the name of our plugin object that measures their tests.
BENCHMARK_PLUGINS, BENCHMARKS = ("benchmark", "codspeed"), "llenergy-benchmarks"

#: Fixtures whose measurements a gate can check; the second is pytest-benchmark's.
GATED_FIXTURES = (ENERGY, "benchmark")

GATE_WITHOUT_ENERGY = (
    "@pytest.mark.energy_gate checks what energy(...) measures, but the test does not use the fixture energy"
)
OPTIONS_WITHOUT_ENERGY = (
    "@pytest.mark.energy_options sets how energy(...) measures, but the test does not use the fixture energy"
)
OPTIONS_OF_BENCHMARK = (
    f"{OPTIONS_WITHOUT_ENERGY}; pytest-benchmark decides the rounds of the fixture benchmark"
)
PARALLEL_WITHOUT_RANKS = (
    "@pytest.mark.parallel divides the work of a test among ranks, but the test has none; use the fixture "
    "backend or workers, or energy with a mark gpus(n)"
)
MARK_WITHOUT_BACKEND = "is for the fixture backend, but the test does not use it"
GPUS_VALUE = (
    "the fixture gpus takes no value: the mark determines the lease; write pytest.param(..., "
    "marks=pytest.mark.gpus(n)), or item.add_marker(pytest.mark.gpus(n)) in pytest_collection_modifyitems"
)
ISOLATE = "the argument isolate of @pytest.mark.gpus"
SETTINGS_WITHOUT_GPUS = (
    "@pytest.mark.gpu_settings changes GPUs, but the test leases none; add @pytest.mark.gpus(1)"
)


def register_benchmarks(config: pytest.Config) -> None:
    """Measure the tests of other benchmark plugins, if one is installed and the run measures."""
    if settings_of(config).measures_nothing or not find_benchmark_plugins(config):
        return
    if not config.pluginmanager.has_plugin(BENCHMARKS):
        from pytest_llenergy.plugin.benchmark import Benchmarks

        config.pluginmanager.register(Benchmarks(config), BENCHMARKS)


def find_benchmark_plugins(config: pytest.Config) -> list[str]:
    """Return the names of the loaded plugins whose benchmarks can be measured."""
    return [name for name in BENCHMARK_PLUGINS if config.pluginmanager.has_plugin(name)]


def check_function(metafunc: pytest.Metafunc) -> None:
    """Parse the marks of a test function and parametrise it over backends, once for all its parameters.

    Raises:
        pytest.Collector.CollectError: A mark is invalid, or no backend can run the test. This is the only
            exception that pytest reports without a traceback at collection.
    """
    node = metafunc.definition
    try:
        plan = parse_plan(node)
        if BACKEND_PARAMETER in metafunc.fixturenames:
            _parametrize_backend(metafunc, plan)
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None


def _parametrize_backend(metafunc: pytest.Metafunc, plan: TestPlan) -> None:
    """Add one parameter for each selected backend; a backend that cannot run the test is skipped.

    Raises ``PlanError`` if no known backend meets the test's requirements.
    """
    state = state_of(metafunc.config)
    selected, backends = state.selected_backends, state.backends
    refusal = explain_unmet_by_all(selected, plan.requirements, backends)
    if refusal is not None:
        raise PlanError(refusal)
    params = []
    for spec in selected:
        reason = explain_unmet(spec, plan.requirements, backends) or spec.explain_unavailable()
        skip = [pytest.mark.skip(reason=reason)] if reason else []
        params.append(pytest.param(spec.name, id=spec.name, marks=skip))
    # Session scope makes pytest group the tests of a backend, which lets them share ranks.
    metafunc.parametrize(BACKEND_PARAMETER, params, indirect=True, scope="session")


def skip_by_option(settings: Settings, items: Sequence[pytest.Item]) -> None:
    """Mark the tests that ``--energy-skip`` or ``--energy-only`` skips."""
    for item in items:
        measures = uses_energy(item) or _measures_benchmark(settings, item)
        if measures and settings.skip:
            item.add_marker(pytest.mark.skip(reason=SKIPPED))
        elif settings.only and not measures:
            item.add_marker(pytest.mark.skip(reason="--energy-only: the test measures no energy"))


def _measures_benchmark(settings: Settings, item: pytest.Item) -> bool:
    """Whether the energy of a benchmark of another plugin would be measured."""
    if not uses_fixture(item, GATED_FIXTURES[1]) or not find_benchmark_plugins(item.config):
        return False
    plan = valid_plan_of(item)
    return settings.keeps_something or (plan is not None and plan.gate is not None)


def check_collected_tests(session: pytest.Session) -> None:
    """Check the marks of all tests, once and for good; send the controller the tests that measure."""
    plans = _check_marks(session.config, session.items)
    if any(plan.gate is not None for plan in plans):
        register_benchmarks(session.config)
    if is_worker(session.config):
        pairs = zip(session.items, plans, strict=True)
        boards_of = {item.nodeid: plan.gpus.n for item, plan in pairs if plan.gpus is not None}
        if any(n > 1 for n in boards_of.values()):
            worker_input_of(session.config).send_boards(boards_of)
    measured = [item.nodeid for item in session.items if is_measured(item)]
    if not measured or not is_worker(session.config):
        return
    session.config.pluginmanager.register(RecordSender())
    # The controller then expects records of these tests, even if this worker dies.
    worker_input_of(session.config).send_tests(measured)


def _check_marks(config: pytest.Config, items: list[pytest.Item]) -> list[TestPlan]:
    """Return the plans of the tests. A test with a wrong mark becomes a collection error and is removed.

    Parameters and hooks may have added marks; those that fixtures add later have no effect.
    """
    plans = []
    # One error for all parameters of a function.
    errors: dict[tuple[str, str], None] = {}
    for item in tuple(items):
        try:
            plan = freeze_plan(item)
            if uses_fixture(item, LEASE) or marks.has_energy_marks(item):
                _check_test(item, plan)
        except LLEnergyError as error:
            errors[item.nodeid.partition("[")[0], str(error)] = None
            # xdist would run the test in spite of the error.
            items.remove(item)
        else:
            plans.append(plan)
    for place, wrong in errors:
        report = pytest.CollectReport(place, "failed", f"{place}: {wrong}", [])
        config.hook.pytest_collectreport(report=report)
    return plans


def _check_test(item: pytest.Item, plan: TestPlan) -> None:
    """Raise ``PlanError`` for a mark without effect; skip a test that its backend cannot run."""
    fixtures = getattr(item, "fixturenames", ())
    if _has_gpus_value(item):
        raise PlanError(GPUS_VALUE)
    own = settings_of(item.config).worker_gpus
    if own is not None and plan.gpus is not None and plan.gpus.n > own:
        raise PlanError(
            f"@pytest.mark.{plan.gpus} needs more than --energy-worker-gpus={own}: raise that to "
            f"{plan.gpus.n}, or run the test in a run without it"
        )
    _check_effects(item, plan, fixtures)
    _check_parallel(plan, fixtures)
    gpu_settings_of(item, plan.gpu_settings)
    if plan.backend is not None:
        state = state_of(item.config)
        reason = explain_unmet(state.backends[plan.backend], plan.requirements, state.backends)
        none_can = reason and explain_unmet_by_all(state.selected_backends, plan.requirements, state.backends)
        if none_can:
            raise PlanError(none_can)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def describe_unavailable_backends(config: pytest.Config) -> str | None:
    """Name the backends that are not installed; return None if ``--energy-backend`` selects some."""
    state = state_of(config)
    if state.settings.backend:
        return None
    used = [spec.name for spec in state.selected_backends]
    absent = [name for name, spec in state.backends.items() if name not in used and spec.needs is None]
    if not absent:
        return None
    missing = f"not installed: {', '.join(absent)} (llenergy doctor --backends)"
    return f"energy: backends: {', '.join(used)}; {missing}"


def prepare_test(item: pytest.Item) -> None:
    """Start the record of a test, and order its fixtures so that the lease comes first.

    Raises:
        PlanError: The test changes GPUs and leases none, or was added after collection with an invalid mark.
    """
    if is_measured(item):
        # Plugins that run a test again call this for each attempt.
        start_record(item)
        if (controller := item.config.pluginmanager.get_plugin("llenergy-controller")) is not None:
            controller.prepare()
    plan = plan_of(item)
    if plan.gpu_settings is not None and plan.gpus is None:
        raise PlanError(f"{item.nodeid}: {SETTINGS_WITHOUT_GPUS}")
    if (plan.gpus is not None or uses_fixture(item, LEASE)) and isinstance(item, pytest.Function):
        lease_first(item, LEASE)


def lease_for_item(item: pytest.Item) -> None:
    """Lease the devices of a test that is not a function, and so has no fixtures, until its teardown."""
    request = plan_of(item).gpus
    if request is not None and not item.config.getoption("setupplan", False):
        stack = ExitStack()
        stack.enter_context(lease_devices(item, request))
        item.addfinalizer(stack.close)


def _check_effects(item: pytest.Item, plan: TestPlan, fixtures: Collection[str]) -> None:
    """Raise ``PlanError`` for a mark that has no effect on a test with these fixtures."""
    energy, benchmark = GATED_FIXTURES
    isolate = plan.gpus.isolate if plan.gpus is not None else None
    if isolate is not None and runs_in_ranks(plan, fixtures):
        raise PlanError(f"{ISOLATE} is for plain tests; the work of this one runs in ranks anyway: remove it")
    if isolate and (MEASURING in fixtures or benchmark in fixtures):
        raise PlanError(
            f"{ISOLATE} is for plain tests; this one measures code in pytest's process: remove it"
        )
    if plan.gate is not None and not any(name in fixtures for name in GATED_FIXTURES):
        raise PlanError(GATE_WITHOUT_ENERGY)
    # A mark on a class or module is for those of its tests that measure.
    options = marks.energy_options.__name__
    if energy not in fixtures and any(mark.name == options for mark in item.own_markers):
        raise PlanError(OPTIONS_OF_BENCHMARK if benchmark in fixtures else OPTIONS_WITHOUT_ENERGY)
    if BACKEND_PARAMETER in fixtures:
        return
    for mark, value in (
        (marks.backend_options, plan.backend_options),
        (marks.backend_needs, plan.backend_needs),
    ):
        if value is not None:
            raise PlanError(f"@pytest.mark.{mark.__name__} {MARK_WITHOUT_BACKEND}")


def _check_parallel(plan: TestPlan, fixtures: Collection[str]) -> None:
    """Raise ``PlanError`` if a test has no ranks for its degrees, or they do not multiply to its devices."""
    if plan.parallel is None:
        return
    if not runs_in_ranks(plan, fixtures):
        raise PlanError(PARALLEL_WITHOUT_RANKS)
    wrong = explain_degree_mismatch(plan.parallel, plan.device_count)
    if wrong is not None:
        raise PlanError(f"@pytest.mark.{wrong}")


def _has_gpus_value(item: pytest.Item) -> bool:
    """Whether a parameter is for this plugin's fixture ``gpus``, not for the test or another such fixture."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or gpus.__name__ not in callspec.params:
        return False
    # Only this private attribute shows which of several fixtures with one name a test uses. Only functions
    # have parameters.
    definitions: Sequence[pytest.FixtureDef[object]]
    definitions = item._fixtureinfo.name2fixturedefs.get(gpus.__name__, ())  # type: ignore[attr-defined]
    return bool(definitions) and definitions[-1].func.__module__ == gpus.__module__
