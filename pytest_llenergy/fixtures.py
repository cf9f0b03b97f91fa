# SPDX-License-Identifier: Apache-2.0
"""The fixtures; ``pytest --fixtures`` shows the first line of each.

Every run imports this module, so what the fixtures return is imported by the first test that uses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.settings import settings_of
from pytest_llenergy.stash import MEASURED, is_measured, uses_energy

if TYPE_CHECKING:
    from pytest_llenergy.api import BackendHandle, Energy, EnergyMeter, Workers
    from pytest_llenergy.api.context import TestContext
    from pytest_llenergy.backends.base import BackendSpec
    from pytest_llenergy.devices.lease import Lease
    from pytest_llenergy.model.prompts import Prompts

SKIPPED = "--energy-skip: the test measures energy"


@pytest.fixture
def _llenergy_lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    from pytest_llenergy.leasing import lease_devices
    from pytest_llenergy.plan import plan_of

    with lease_devices(request.node, plan_of(request.node).gpus) as lease:
        yield lease


@pytest.fixture
def _llenergy_context(request: pytest.FixtureRequest, _llenergy_lease: Lease) -> Iterator[TestContext]:
    from pytest_llenergy.api.context import TestContext
    from pytest_llenergy.draft import draft_of
    from pytest_llenergy.plan import plan_of
    from pytest_llenergy.session import state_of

    item = request.node
    context = TestContext(state_of(item.config), plan_of(item), _llenergy_lease, draft_of(item), item.nodeid)
    yield context
    context.end()


@pytest.fixture
def _llenergy_measured(request: pytest.FixtureRequest) -> None:
    # A test may request it by ``request.getfixturevalue``, which was unknown until now.
    known = uses_energy(request.node)
    request.node.stash[MEASURED] = True
    if settings_of(request.config).skip:
        raise pytest.skip.Exception(SKIPPED, _use_item_location=True)
    if not known and is_measured(request.node):
        from pytest_llenergy.recorder import announce

        announce(request.node)


@pytest.fixture
def gpus(_llenergy_lease: Lease) -> Lease:
    """The leased devices of this test: uuids, indices, names, visible_devices.

    Without a ``gpus`` mark: the CPU, but for energy of code in pytest's own process every GPU that it sees.
    Skips the test, with the reason, if there are too few GPUs.
    """
    return _llenergy_lease


@pytest.fixture
def energy(
    request: pytest.FixtureRequest, _llenergy_measured: None, _llenergy_context: TestContext
) -> Energy:
    """Measure a call: run = energy(backend.generate, prompts, max_new_tokens=64); run.energy_j.

    The call is repeated: warm-up, then ``--energy-rounds`` rounds with quiet gaps between them. The mark
    ``energy_options`` changes that for a test, and ``energy.pedantic`` runs an exact number of calls.
    """
    from pytest_llenergy.api import Energy
    from pytest_llenergy.plan import plan_of

    # Read when the test measures, since hooks and fixtures may add marks until then.
    return Energy(_llenergy_context, lambda: plan_of(request.node).energy_options or {})


@pytest.fixture
def energy_meter(_llenergy_measured: None, _llenergy_context: TestContext) -> Iterator[EnergyMeter]:
    """Measure stretches of a test: with energy_meter("load") as window: ...; window.energy_j."""
    from pytest_llenergy.api import EnergyMeter

    meter = EnergyMeter(_llenergy_context)
    yield meter
    meter.close()


@pytest.fixture
def workers(_llenergy_context: TestContext) -> Workers:
    """The ranks of this test: workers.run(fn, *args) calls fn on each and returns the results by rank."""
    from pytest_llenergy.api import Workers

    return Workers(_llenergy_context)


@pytest.fixture
def energy_model(request: pytest.FixtureRequest) -> str:
    """The model for the backend fixture; override it to choose another model for a module or a test."""
    from pytest_llenergy.session import state_of

    return state_of(request.config).settings.model


@pytest.fixture(scope="session")
def _llenergy_backend(request: pytest.FixtureRequest) -> str:
    if not hasattr(request, "param"):
        raise PlanError("a test runs once for each backend: make the fixture backend one of its parameters")
    return str(request.param)


@pytest.fixture
def backend(_llenergy_backend: str, energy_model: str, _llenergy_context: TestContext) -> BackendHandle:
    """One inference backend with a model; the test runs once for each backend that is available.

    ``backend.generate(prompts, ...)`` generates; ``energy(backend.generate, ...)`` measures it.
    """
    from pytest_llenergy.api import BackendHandle
    from pytest_llenergy.backends.models import resolve_model

    context = _llenergy_context
    spec, model = context.state.backends[_llenergy_backend], resolve_model(energy_model)
    reason = spec.refuses(model) or _explain_missing_device(spec, has_gpu=bool(context.lease.uuids))
    if reason is not None:
        pytest.skip(reason)
    options = spec.capabilities.without_off(context.plan.backend_options or {})
    return BackendHandle(spec, model, context, options)


def _explain_missing_device(spec: BackendSpec, *, has_gpu: bool) -> str | None:
    """Return why a backend cannot run on the test's devices, or None if it can."""
    if has_gpu:
        return None if spec.capabilities.gpu else f"{spec.name} does not run on GPUs here"
    if spec.capabilities.cpu:
        return None
    why = spec.capabilities.reasons.get("cpu", "")
    return f"{spec.name} does not run on the CPU here{f' ({why})' if why else ''}"


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """A small set of prompts of mixed lengths, or those of --energy-prompts=FILE."""
    from pytest_llenergy.session import state_of

    return state_of(request.config).prompts
