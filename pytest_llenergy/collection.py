# SPDX-License-Identifier: Apache-2.0
"""What marks make of a test: one test a backend, a lease, or an error where they cannot be met."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pytest_llenergy import marks
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.fixtures import BACKEND_PARAMETER, LEASE, gpus
from pytest_llenergy.leasing import leased
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.recorder import draft_of
from pytest_llenergy.state import state_of
from pytest_llenergy.workers.plan import refuse

IDLE_GATE = (
    "@pytest.mark.energy_gate judges what energy(...) measures, and the test does not use the fixture energy"
)

VALUE = (
    "the fixture gpus takes no value: what is leased is what the mark says; write pytest.param(..., "
    "marks=pytest.mark.gpus(n)), or item.add_marker(pytest.mark.gpus(n)) in pytest_collection_modifyitems"
)

LATE = (
    "was added while the test was set up, after its devices were leased; add it in "
    "pytest_collection_modifyitems, or write pytest.param(..., marks=...)"
)


def check_marks(metafunc: pytest.Metafunc) -> None:
    """Hold a test's marks against what it uses: no mark may be there and do nothing.

    Raises ``CollectError``, the one exception that pytest prints as a clean collection error.
    """
    node = metafunc.definition
    try:
        marks.check_all(node)
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    if marks.has(node, marks.energy_gate) and "energy" not in metafunc.fixturenames:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {IDLE_GATE}")


def refuse_value(item: pytest.Function) -> None:
    """A parameter ``gpus`` of the test itself, or of a fixture of that name that others made, is theirs.

    Raises ``CollectError`` where it is given to our fixture.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.get(gpus.__name__, ())
    if fixtures and fixtures[-1].func.__module__ == gpus.__module__:
        raise pytest.Collector.CollectError(f"{item.nodeid}: {VALUE}")


def obey_marks(item: pytest.Item) -> None:
    """Before a test is set up: check marks that its function does not carry, and put its lease first.

    Such marks come from ``pytest.param(marks=...)``, from ``add_marker``, and on tests of ``unittest``, for
    which ``pytest_generate_tests`` is not called. Raises ``PlanError`` naming the test and the mark.
    """
    try:
        marks.check_all(item)
    except LLEnergyError as error:
        raise PlanError(f"{item.nodeid}: {error}") from None
    names = getattr(item, "fixturenames", ())
    if marks.has(item, marks.energy_gate) and "energy" not in names:
        raise PlanError(f"{item.nodeid}: {IDLE_GATE}")
    if isinstance(item, pytest.Function) and (LEASE in names or marks.has(item, marks.gpus)):
        _lease_first(item)


def see_to_lease(item: pytest.Item) -> None:
    """After a test was set up: the lease of one that is no function, until its teardown.

    Raises ``PlanError`` for a mark of a function that came when its devices had been chosen.
    """
    if not marks.has(item, marks.gpus) or item.config.getoption("setupplan", False):
        return
    if isinstance(item, pytest.Function):
        asked, draft = marks.read(item, marks.gpus), draft_of(item)
        if draft.lease is None or draft.asked != asked:
            raise PlanError(f"{item.nodeid}: @pytest.mark.{asked} {LATE}")
    elif LEASE not in getattr(item, "fixturenames", ()):
        stack = ExitStack()
        stack.enter_context(leased(item))
        item.addfinalizer(stack.close)


def _lease_first(item: pytest.Function) -> None:
    """Put the lease before everything that is set up for this test alone, and so torn down after it.

    What a fixture starts on the devices must neither come before the lease nor outlive it.
    """
    # All tests of a function share one list.
    names = [name for name in item.fixturenames if name != LEASE]
    first = next((place for place, name in enumerate(names) if _is_for_one_test(item, name)), len(names))
    item.fixturenames = [*names[:first], LEASE, *names[first:]]


def _is_for_one_test(item: pytest.Function, name: str) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.get(name)
    return not fixtures or fixtures[-1].scope == "function"


def parametrize_backend(metafunc: pytest.Metafunc) -> None:
    """Give the test one parameter a selected backend; those that cannot run it are skipped, saying why.

    Raises ``CollectError`` when no selected backend offers the parallelism that the test asks for.
    """
    node = metafunc.definition
    state = state_of(metafunc.config)
    try:
        selected = state.selected_backends
        parallel = marks.read(node, marks.parallel) or Parallel()
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    able = [name for name, spec in state.backends.items() if not spec.capabilities.lacks(parallel)]
    refusals = [refuse(spec, parallel, able) for spec in selected]
    if all(refusals):
        raise pytest.Collector.CollectError(f"{node.nodeid}: {'; '.join(filter(None, refusals))}")
    params = []
    for spec, refusal in zip(selected, refusals, strict=True):
        reason = refusal or spec.missing()
        skip = [pytest.mark.skip(reason=reason)] if reason else []
        params.append(pytest.param(spec.name, id=spec.name, marks=skip))
    # Session scope makes pytest group the tests of a backend, so that its ranks are used again.
    metafunc.parametrize(BACKEND_PARAMETER, params, indirect=True, scope="session")
