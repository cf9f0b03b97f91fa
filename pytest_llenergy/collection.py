# SPDX-License-Identifier: Apache-2.0
"""Parametrise tests over backends and check marks at collection."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

import pytest

from pytest_llenergy import marks
from pytest_llenergy.backends.registry import Requirements, explain_unmet, explain_unmet_by_all
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.fixtures import gpus
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.plan import check_marks, has_mark, read_mark
from pytest_llenergy.recorder import begin, draft_of
from pytest_llenergy.session import lease_first, leased, state_of
from pytest_llenergy.stash import BACKEND_PARAMETER, LEASE, is_measured
from pytest_llenergy.workers.plan import explain_degree_mismatch
from pytest_llenergy.xdist import errand_of, is_worker

#: Plugins that have a fixture ``benchmark``, and the object that measures its tests.
OTHERS, BENCHMARKS = ("benchmark", "codspeed"), "llenergy-benchmarks"


def see_to_benchmarks(config: pytest.Config) -> None:
    """Measure the tests of other benchmark plugins, where there is one."""
    manager = config.pluginmanager
    known = any(manager.has_plugin(name) for name in OTHERS)
    if known and not manager.has_plugin(BENCHMARKS):
        from pytest_llenergy.integrations.benchmark import Benchmarks

        manager.register(Benchmarks(config), BENCHMARKS)


# Which engines a test runs with: one test for each that can, by its capability row and the test's marks.

ELSEWHERE = "add it in pytest_collection_modifyitems, or write pytest.param(..., marks=...)"
LATE_BACKEND_MARKS = f"were changed while the test was set up, after its engine was chosen; {ELSEWHERE}"

#: Marks that say which engines a test is for, and what they are told.
OF_BACKEND = (marks.backend_options, marks.backend_needs)

#: What the marks said when the engine of a test was chosen.
CHOSEN_FOR = pytest.StashKey[Requirements]()


def parametrize_backend(metafunc: pytest.Metafunc) -> None:
    """Give the test one parameter a selected backend; those that cannot run it are skipped, saying why.

    Raises ``CollectError`` when no backend that is known offers what the test asks for: degrees, load
    options, or what ``backend_needs`` names.
    """
    node = metafunc.definition
    state = state_of(metafunc.config)
    try:
        selected, known = state.selected_backends, state.backends
        demand = _asked(node)
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    if (none_can := explain_unmet_by_all(selected, demand, known)) is not None:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {none_can}")
    params = []
    for spec in selected:
        reason = explain_unmet(spec, demand, known) or spec.missing()
        skip = [pytest.mark.skip(reason=reason)] if reason else []
        params.append(pytest.param(spec.name, id=spec.name, marks=skip))
    # Session scope makes pytest group the tests of a backend, so that its ranks are used again.
    metafunc.parametrize(BACKEND_PARAMETER, params, indirect=True, scope="session")


def check_engine(item: pytest.Item) -> None:
    """Hold the engine that a test was given against all its marks, as ``parametrize_backend`` does.

    Skips the test where others could run it. Raises ``PlanError`` where none that is known can.
    """
    name = _backend_of(item)
    if name is None:
        return
    state = state_of(item.config)
    item.stash[CHOSEN_FOR] = demand = _asked(item)
    known = state.backends
    refusal = explain_unmet(known[name], demand, known)
    if refusal is None:
        return
    if (none_can := explain_unmet_by_all(state.selected_backends, demand, known)) is not None:
        raise PlanError(f"{item.nodeid}: {none_can}")
    # Told with the place of the test, not of this line.
    raise pytest.skip.Exception(refusal, _use_item_location=True)


def see_to_engine(item: pytest.Item) -> None:
    """After a test was set up. Raises ``PlanError`` where a fixture has changed what its engine runs."""
    if CHOSEN_FOR in item.stash and item.stash[CHOSEN_FOR] != _asked(item):
        told = ", ".join(f"@pytest.mark.{mark.__name__}" for mark in (*OF_BACKEND, marks.parallel))
        raise PlanError(f"{item.nodeid}: {told} {LATE_BACKEND_MARKS}")


def told_of_engines(config: pytest.Config) -> str | None:
    """One line for what was left out as not installed; ``None`` where engines are named."""
    state = state_of(config)
    if state.settings.backend:
        return None
    used = [spec.name for spec in state.selected_backends]
    absent = [name for name, spec in state.backends.items() if name not in used and spec.needs is None]
    return (
        f"energy: engines: {', '.join(used)}; not installed: {', '.join(absent)} (llenergy doctor --backends)"
        if absent
        else None
    )


def _backend_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get(BACKEND_PARAMETER) if callspec is not None else None
    return name if isinstance(name, str) else None


def _asked(item: pytest.Item) -> Requirements:
    """What the marks of a test ask of its engine. Raises ``PlanError``."""
    devices, parallel = read_mark(item, marks.gpus), read_mark(item, marks.parallel)
    options = read_mark(item, marks.backend_options) or {}
    needs = read_mark(item, marks.backend_needs) or Requirements()
    n = devices.n if devices is not None else 1
    implied = f"with {n} devices and no mark parallel(...) a test is data parallel" if n > 1 else ""
    return replace(
        needs,
        parallel=parallel or Parallel(data=n),
        options=options,
        implied="" if parallel else implied,
    )


# What marks make of a test: a lease, or an error where they cannot be met.

IDLE_GATE = (
    "@pytest.mark.energy_gate judges what energy(...) measures, and the test does not use the fixture energy"
)

#: Fixtures by which a test measures something that a gate can judge; the second is pytest-benchmark's.
JUDGED = ("energy", "benchmark")

VALUE = (
    "the fixture gpus takes no value: what is leased is what the mark says; write pytest.param(..., "
    "marks=pytest.mark.gpus(n)), or item.add_marker(pytest.mark.gpus(n)) in pytest_collection_modifyitems"
)

#: What the marks said before a test was set up: its degrees, and whether it has a gate.
BEFORE = pytest.StashKey[tuple[Parallel, bool]]()

LATE = f"was added while the test was set up, too late to count; {ELSEWHERE}"

#: Fixtures whose ranks the degrees are for.
RUNS_RANKS = frozenset((BACKEND_PARAMETER, "workers"))

IDLE_OF_BACKEND = "is for the engine of the fixture backend, and the test does not use it"


def see_to_function(metafunc: pytest.Metafunc) -> None:
    """Once for all parameters of a test: its marks are held against what it uses, and it gets its engines.

    No mark may be there and do nothing. Raises ``CollectError``, the one exception that pytest prints as a
    clean collection error.
    """
    node = metafunc.definition
    try:
        check_marks(node)
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    if (idle := _idle(node, metafunc.fixturenames)) is not None:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {idle}")
    if has_mark(node, marks.energy_gate):
        see_to_benchmarks(metafunc.config)
    if BACKEND_PARAMETER in metafunc.fixturenames:
        parametrize_backend(metafunc)


def see_to_tests(session: pytest.Session) -> None:
    """Once all are collected and have their marks: which of them can be, and who is to wait for them."""
    _check_degrees(session.config, session.items)
    if any(has_mark(item, marks.energy_gate) for item in session.items):
        see_to_benchmarks(session.config)
    measured = [item.nodeid for item in session.items if is_measured(item)]
    # From what xdist tells next on, the controller waits for these, also if others here die.
    if measured and is_worker(session.config):
        errand_of(session.config).tell_tests(measured)


def _check_degrees(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out each test whose degrees do not multiply to the devices of its mark: a collection error."""
    # Once for all parameters of a test.
    told: dict[tuple[str, str], None] = {}
    for item in tuple(items):
        if (wrong := _wrong_degrees(item)) is not None:
            told[item.nodeid.partition("[")[0], wrong] = None
            # As what cannot be collected: xdist runs what there is, errors or not.
            items.remove(item)
    for place, wrong in told:
        report = pytest.CollectReport(place, "failed", f"{place}: @pytest.mark.{wrong}", [])
        config.hook.pytest_collectreport(report=report)


def _wrong_degrees(item: pytest.Item) -> str | None:
    if not RUNS_RANKS.intersection(getattr(item, "fixturenames", ())):
        return None
    try:
        degrees, asked = read_mark(item, marks.parallel), read_mark(item, marks.gpus)
    except LLEnergyError:
        # A bad mark that a hook has added is told when its test is set up.
        return None
    return (
        explain_degree_mismatch(degrees, asked.n if asked is not None else 1) if degrees is not None else None
    )


def see_to_test(item: pytest.Item) -> None:
    """Before a test is set up: begin its record, check marks that its function does not carry, lease first.

    Such marks come from ``pytest.param(marks=...)``, from ``add_marker``, and on tests of ``unittest``, for
    which ``pytest_generate_tests`` is not called. Raises ``PlanError`` naming the test and the mark, and for
    a value that is given to the fixture ``gpus``.
    """
    if is_measured(item):
        # Plugins that run a test again do so within one protocol.
        begin(item)
    if LEASE not in getattr(item, "fixturenames", ()) and not marks.on(item):
        return
    if _gives_value(item):
        raise PlanError(f"{item.nodeid}: {VALUE}")
    item.stash[BEFORE] = _, gated = _check(item)
    if gated:
        see_to_benchmarks(item.config)
    check_engine(item)
    if isinstance(item, pytest.Function) and (LEASE in item.fixturenames or has_mark(item, marks.gpus)):
        lease_first(item, LEASE)


def see_to_late_marks(item: pytest.Item) -> None:
    """After a test was set up: fixtures may have added some. Raises ``PlanError`` for what comes too late."""
    degrees, gated = _check(item)
    degrees_before, gated_before = item.stash.get(BEFORE, (Parallel(), False))
    if degrees != degrees_before:
        raise PlanError(f"{item.nodeid}: @pytest.mark.parallel {LATE}")
    # Of a test that is measured it is judged, whenever it came.
    if gated and not gated_before and not is_measured(item):
        raise PlanError(f"{item.nodeid}: @pytest.mark.energy_gate {LATE}")
    _see_to_lease(item)
    see_to_engine(item)


def _check(item: pytest.Item) -> tuple[Parallel, bool]:
    """Hold all marks of a test against what it uses; gives its degrees and whether it has a gate.

    Raises ``PlanError`` naming test and mark.
    """
    try:
        check_marks(item)
    except LLEnergyError as error:
        raise PlanError(f"{item.nodeid}: {error}") from None
    if (idle := _idle(item, getattr(item, "fixturenames", ()))) is not None:
        raise PlanError(f"{item.nodeid}: {idle}")
    return read_mark(item, marks.parallel) or Parallel(), has_mark(item, marks.energy_gate)


def _gives_value(item: pytest.Item) -> bool:
    """Whether a parameter goes to our fixture, not to the test or to one of that name that others made."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or gpus.__name__ not in callspec.params:
        return False
    # Which fixture of a name a test has is told nowhere else; only functions have parameters.
    fixtures = item._fixtureinfo.name2fixturedefs.get(gpus.__name__, ())  # type: ignore[attr-defined]
    return bool(fixtures) and fixtures[-1].func.__module__ == gpus.__module__


def _idle(item: pytest.Item, names: Collection[str]) -> str | None:
    """What is wrong where a mark of the test would do nothing, by the names of its fixtures."""
    if has_mark(item, marks.energy_gate) and not any(name in names for name in JUDGED):
        return IDLE_GATE
    idle = [mark.__name__ for mark in OF_BACKEND if has_mark(item, mark) and BACKEND_PARAMETER not in names]
    return f"@pytest.mark.{idle[0]} {IDLE_OF_BACKEND}" if idle else None


def _see_to_lease(item: pytest.Item) -> None:
    """The lease of a test that is no function, until its teardown.

    Raises ``PlanError`` for a mark of a function that came when its devices had been chosen.
    """
    if not has_mark(item, marks.gpus) or item.config.getoption("setupplan", False):
        return
    if isinstance(item, pytest.Function):
        asked, draft = read_mark(item, marks.gpus), draft_of(item)
        if draft.lease is None or draft.asked != asked:
            raise PlanError(f"{item.nodeid}: @pytest.mark.{asked} {LATE}")
    elif LEASE not in getattr(item, "fixturenames", ()):
        stack = ExitStack()
        stack.enter_context(leased(item))
        item.addfinalizer(stack.close)
