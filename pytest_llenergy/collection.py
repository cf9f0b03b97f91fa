# SPDX-License-Identifier: Apache-2.0
"""What marks make of a test: one test a backend, a lease, or an error where they cannot be met."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pytest_llenergy import marks
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.fixtures import BACKEND_PARAMETER
from pytest_llenergy.leasing import leased
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.state import state_of
from pytest_llenergy.workers.plan import refuse

#: The fixture that takes the lease.
LEASE = "gpus"

IDLE_GATE = (
    "@pytest.mark.energy_gate judges what energy(...) measures, and the test does not use the fixture energy"
)


def check_marks(metafunc: pytest.Metafunc) -> None:
    """Hold a test's marks against what it uses: no mark may be there and do nothing.

    Raises ``CollectError``, the one exception that pytest prints as a clean collection error.
    """
    node = metafunc.definition
    try:
        marks.check_all(list(node.iter_markers()))
    except LLEnergyError as error:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {error}") from None
    if node.get_closest_marker(marks.energy_gate.__name__) and "energy" not in metafunc.fixturenames:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {IDLE_GATE}")
    if node.get_closest_marker(marks.gpus.__name__) and LEASE not in metafunc.fixturenames:
        # The lease is taken by the fixture, whether or not the test wants to look at it.
        metafunc.fixturenames.append(LEASE)


def obey_marks(item: pytest.Item) -> None:
    """Before a test is set up: the same for marks that its function does not carry.

    They come from ``pytest.param(marks=...)``, from ``add_marker``, and on tests of ``unittest``, for which
    ``pytest_generate_tests`` is not called. Raises ``PlanError`` naming the test and the mark.
    """
    try:
        marks.check_all(list(item.iter_markers()))
    except LLEnergyError as error:
        raise PlanError(f"{item.nodeid}: {error}") from None
    names = getattr(item, "fixturenames", ())
    if item.get_closest_marker(marks.energy_gate.__name__) and "energy" not in names:
        raise PlanError(f"{item.nodeid}: {IDLE_GATE}")
    if isinstance(item, pytest.Function) and _lacks_lease(item):
        # All tests of a function share one list.
        item.fixturenames = [*names, LEASE]


def lease_without_fixtures(item: pytest.Item) -> None:
    """The lease of a test that is no function, from the end of its set-up to its teardown."""
    if (
        isinstance(item, pytest.Function)
        or not _lacks_lease(item)
        or item.config.getoption("setupplan", False)
    ):
        return
    stack = ExitStack()
    stack.enter_context(leased(item))
    item.addfinalizer(stack.close)


def _lacks_lease(item: pytest.Item) -> bool:
    marked = item.get_closest_marker(marks.gpus.__name__) is not None
    return marked and LEASE not in getattr(item, "fixturenames", ())


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
