# SPDX-License-Identifier: Apache-2.0
"""Which engines a test runs with: one test for each that can, by its capability row and the test's marks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llenergy import marks
from pytest_llenergy.backends.demand import Demand, refuse, refuse_all
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.marked import read_mark
from pytest_llenergy.model.record import Parallel
from pytest_llenergy.process import BACKEND_PARAMETER
from pytest_llenergy.state import state_of

ELSEWHERE = "add it in pytest_collection_modifyitems, or write pytest.param(..., marks=...)"
LATE = f"were changed while the test was set up, after its engine was chosen; {ELSEWHERE}"

#: Marks that say which engines a test is for, and what they are told.
OF_BACKEND = (marks.backend_options, marks.backend_needs)

#: What the marks said when the engine of a test was chosen.
CHOSEN_FOR = pytest.StashKey[Demand]()


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
    if (none_can := refuse_all(selected, demand, known)) is not None:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {none_can}")
    params = []
    for spec in selected:
        reason = refuse(spec, demand, known) or spec.missing()
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
    refusal = refuse(known[name], demand, known)
    if refusal is None:
        return
    if (none_can := refuse_all(state.selected_backends, demand, known)) is not None:
        raise PlanError(f"{item.nodeid}: {none_can}")
    # Told with the place of the test, not of this line.
    raise pytest.skip.Exception(refusal, _use_item_location=True)


def see_to_engine(item: pytest.Item) -> None:
    """After a test was set up. Raises ``PlanError`` where a fixture has changed what its engine runs."""
    if CHOSEN_FOR in item.stash and item.stash[CHOSEN_FOR] != _asked(item):
        told = ", ".join(f"@pytest.mark.{mark.__name__}" for mark in (*OF_BACKEND, marks.parallel))
        raise PlanError(f"{item.nodeid}: {told} {LATE}")


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


def _asked(item: pytest.Item) -> Demand:
    """What the marks of a test ask of its engine. Raises ``PlanError``."""
    devices, parallel = read_mark(item, marks.gpus), read_mark(item, marks.parallel)
    options = read_mark(item, marks.backend_options) or {}
    needs = read_mark(item, marks.backend_needs) or Demand()
    n = devices.n if devices is not None else 1
    implied = f"with {n} devices and no mark parallel(...) a test is data parallel" if n > 1 else ""
    return replace(
        needs,
        parallel=parallel or Parallel(data=n),
        options=options,
        implied="" if parallel else implied,
    )
