# SPDX-License-Identifier: Apache-2.0
"""The fixtures; ``pytest --fixtures`` shows the first line of each.

Every run imports this module, so what the fixtures return is imported by the first test that uses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.errors import PlanError
from pytest_llenergy.stash import MEASURED, is_measured

if TYPE_CHECKING:
    from pytest_llenergy.api import BackendHandle, Energy, EnergyMeter, TestContext, Workers
    from pytest_llenergy.devices.lease import Lease
    from pytest_llenergy.model.prompts import Prompts


@pytest.fixture
def _llenergy_lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    from pytest_llenergy.plan import plan_of
    from pytest_llenergy.session import lease_devices

    with lease_devices(request.node, plan_of(request.node).gpus) as lease:
        yield lease


@pytest.fixture
def _llenergy_context(request: pytest.FixtureRequest, _llenergy_lease: Lease) -> Iterator[TestContext]:
    from pytest_llenergy.api import TestContext
    from pytest_llenergy.plan import plan_of
    from pytest_llenergy.recorder import draft_of
    from pytest_llenergy.session import state_of

    item = request.node
    context = TestContext(state_of(item.config), plan_of(item), _llenergy_lease, draft_of(item), item.nodeid)
    yield context
    context.end()


@pytest.fixture
def _llenergy_measured(request: pytest.FixtureRequest) -> None:
    if not is_measured(request.node):
        # The test requests it by ``request.getfixturevalue``, which was unknown during set-up.
        from pytest_llenergy.recorder import announce

        announce(request.node)
    request.node.stash[MEASURED] = True


@pytest.fixture
def gpus(_llenergy_lease: Lease) -> Lease:
    """The leased devices of this test: uuids, indices, names, visible_devices.

    Without a ``gpus`` mark the device is the CPU. Skips the test, with the reason, if there are too few GPUs.
    """
    return _llenergy_lease


@pytest.fixture
def energy(_llenergy_measured: None, _llenergy_context: TestContext) -> Energy:
    """Measure a call: run = energy(backend.generate, prompts, max_new_tokens=64); run.energy_j.

    The call is repeated: warm-up, then ``--energy-rounds`` rounds with quiet gaps between them.
    """
    from pytest_llenergy.api import Energy

    return Energy(_llenergy_context)


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
    from pytest_llenergy.api import make_backend

    return make_backend(_llenergy_context, _llenergy_backend, energy_model)


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """A small set of prompts of mixed lengths, or those of --energy-prompts=FILE."""
    from pytest_llenergy.model.prompts import default_prompts, load_prompts
    from pytest_llenergy.session import state_of

    path = state_of(request.config).settings.prompts
    return default_prompts() if path is None else load_prompts(path)
