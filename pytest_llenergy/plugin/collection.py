# SPDX-License-Identifier: Apache-2.0
"""Parametrise tests over backends; check at collection that every mark is valid."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_llenergy.backends.registry import explain_unmet, explain_unmet_by_all
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin import marks
from pytest_llenergy.plugin.fixtures import SKIPPED
from pytest_llenergy.plugin.leasing import gpu_settings_of, lease_first
from pytest_llenergy.plugin.plan import TestPlan, closest_marks, freeze_plan, plan_of, runs_in_ranks
from pytest_llenergy.plugin.recorder import start_record
from pytest_llenergy.plugin.session import state_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.stash import (
    BACKEND_PARAMETER,
    BENCHMARK,
    ENERGY,
    LEASE,
    MEASURING,
    is_measured,
    is_worker,
    uses_energy,
    uses_fixture,
)
from pytest_llenergy.plugin.xdist import BOARDS, WRONG, worker_input_of
from pytest_llenergy.ranks.plan import explain_degree_mismatch

#: Name of our plugin object that measures the tests of pytest-benchmark.
BENCHMARKS = "llenergy-benchmarks"

GATE_WITHOUT_ENERGY = (
    "@pytest.mark.energy_gate checks what energy(...) measures, but the test does not use the fixture energy"
)
PARALLEL_WITHOUT_RANKS = (
    "@pytest.mark.parallel divides the work of a test among ranks, but the test has none; use the fixture "
    "backend or workers, or energy with a mark gpus(n)"
)
ISOLATE = "the argument isolate of @pytest.mark.gpus is for plain tests"
SETTINGS_WITHOUT_GPUS = (
    "@pytest.mark.gpu_settings changes GPUs, but the test leases none; add @pytest.mark.gpus(1)"
)


def register_benchmarks(config: pytest.Config) -> None:
    """Measure the tests of pytest-benchmark, if it is installed and the run measures."""
    manager = config.pluginmanager
    installed = manager.has_plugin(BENCHMARK) and not settings_of(config).measures_nothing
    if installed and not manager.has_plugin(BENCHMARKS):
        from pytest_llenergy.plugin.benchmark import Benchmarks

        manager.register(Benchmarks(config), BENCHMARKS)


def parametrize_backend(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each selected backend.

    Raises:
        pytest.Collector.CollectError: The backends cannot be loaded. This is the only exception that pytest
            reports without a traceback at collection.
    """
    try:
        selected = state_of(metafunc.config).selected_backends
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
    names = [spec.name for spec in selected]
    # Session scope makes pytest group the tests of a backend, which lets them share ranks.
    metafunc.parametrize(BACKEND_PARAMETER, names, ids=names, indirect=True, scope="session")


def skip_by_option(settings: Settings, items: Sequence[pytest.Item]) -> None:
    """Mark the tests that ``--energy-skip`` or ``--energy-only`` skips."""
    for item in items:
        measures = uses_energy(item) or _measures_benchmark(settings, item)
        if measures and settings.skip:
            item.add_marker(pytest.mark.skip(reason=SKIPPED))
        elif settings.only and not measures:
            item.add_marker(pytest.mark.skip(reason="--energy-only: the test measures no energy"))


def _measures_benchmark(settings: Settings, item: pytest.Item) -> bool:
    """Whether the energy of a benchmark of pytest-benchmark would be measured."""
    if not uses_fixture(item, BENCHMARK) or not item.config.pluginmanager.has_plugin(BENCHMARK):
        return False
    return settings.keeps_something or next(closest_marks(item, marks.energy_gate.__name__), None) is not None


def check_collected_tests(session: pytest.Session) -> None:
    """Check the marks of all tests, once and for good. A test with a wrong one becomes a collection error.

    Parameters and hooks may have added marks; those that fixtures add later have no effect.
    """
    # One error for all parameters of a function.
    errors: dict[tuple[str, str], None] = {}
    boards_of = {}
    for item in tuple(session.items):
        try:
            plan = freeze_plan(item)
            if uses_fixture(item, LEASE) or marks.has_energy_marks(item):
                _check_test(item, plan)
        except LLEnergyError as error:
            errors[item.nodeid.partition("[")[0], str(error)] = None
            # xdist would run the test in spite of the error.
            session.items.remove(item)
            continue
        if plan.gate is not None:
            register_benchmarks(session.config)
        if plan.gpus is not None:
            boards_of[item.nodeid] = plan.gpus.n
    for place, wrong in errors:
        report = pytest.CollectReport(place, "failed", f"{place}: {wrong}", [])
        session.config.hook.pytest_collectreport(report=report)
    if errors and not session.config.getoption("continue_on_collection_errors"):
        worker_input_of(session.config).send(WRONG, len(errors))
    if is_worker(session.config) and any(n > 1 for n in boards_of.values()):
        worker_input_of(session.config).send(BOARDS, boards_of)


def _check_test(item: pytest.Item, plan: TestPlan) -> None:
    """Raise ``PlanError`` for a mark that cannot be followed; skip a test that its backend cannot run."""
    own = settings_of(item.config).worker_gpus
    if own is not None and plan.gpus is not None and plan.gpus.n > own:
        raise PlanError(
            f"@pytest.mark.{plan.gpus} needs more than --energy-worker-gpus={own}: raise that to "
            f"{plan.gpus.n}, or run the test in a run without it"
        )
    fixtures = getattr(item, "fixturenames", ())
    in_ranks = runs_in_ranks(plan, fixtures)
    isolate = plan.gpus.isolate if plan.gpus is not None else None
    if isolate is not None and in_ranks:
        raise PlanError(f"{ISOLATE}; the work of this one runs in ranks anyway: remove it")
    if isolate and (MEASURING in fixtures or BENCHMARK in fixtures):
        raise PlanError(f"{ISOLATE}; this one measures code in pytest's process: remove it")
    has_benchmark = BENCHMARK in fixtures and item.config.pluginmanager.has_plugin(BENCHMARK)
    if plan.gate is not None and not (ENERGY in fixtures or has_benchmark):
        raise PlanError(GATE_WITHOUT_ENERGY)
    if plan.parallel is not None and not in_ranks:
        raise PlanError(PARALLEL_WITHOUT_RANKS)
    if plan.parallel is not None and (wrong := explain_degree_mismatch(plan.parallel, plan.device_count)):
        raise PlanError(f"@pytest.mark.{wrong}")
    gpu_settings_of(item, plan.gpu_settings)
    if plan.backend is not None:
        _check_backend(item, plan, plan.backend)


def _check_backend(item: pytest.Item, plan: TestPlan, name: str) -> None:
    """Skip a test that its backend cannot run. Raises ``PlanError`` if no known backend can."""
    state = state_of(item.config)
    backends = state.backends
    reason = explain_unmet(backends[name], plan.requirements)
    if reason and (none_can := explain_unmet_by_all(state.selected_backends, plan.requirements, backends)):
        raise PlanError(none_can)
    reason = reason or backends[name].explain_unavailable()
    if reason is not None:
        item.add_marker(pytest.mark.skip(reason=reason))


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
