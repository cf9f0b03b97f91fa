# SPDX-License-Identifier: Apache-2.0
"""The fixtures, each with a first line that ``pytest --fixtures`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.stash import MEASURED, READY, is_measured

if TYPE_CHECKING:
    # Defining fixtures costs every run; what they are made of is imported by the first test that asks.
    from pytest_llenergy.api import BackendHandle, Energy, EnergyMeter, Place, Workers
    from pytest_llenergy.devices.lease import Lease
    from pytest_llenergy.model.prompts import Prompts


@pytest.fixture
def _llenergy_lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    from pytest_llenergy.session import leased

    request.config.stash[READY]()
    with leased(request.node) as lease:
        yield lease


@pytest.fixture
def gpus(_llenergy_lease: Lease) -> Lease:
    """The devices of this test, exclusively its own while it runs: uuids, indices, names, visible_devices.

    Without a ``gpus`` mark that is the CPU. Skips the test, with the reason, when there are too few GPUs.
    """
    return _llenergy_lease


@pytest.fixture
def _llenergy_place(request: pytest.FixtureRequest, _llenergy_lease: Lease) -> Iterator[Place]:
    from pytest_llenergy.api import place_of

    place = place_of(request.node, _llenergy_lease)
    yield place
    place.end()


@pytest.fixture
def _llenergy_measured(request: pytest.FixtureRequest) -> None:
    request.config.stash[READY]()
    if not is_measured(request.node):
        # It asks for it as it runs.
        from pytest_llenergy.recorder import announce

        announce(request.node)
    request.node.stash[MEASURED] = True


@pytest.fixture
def energy(_llenergy_measured: None, _llenergy_place: Place) -> Energy:
    """Measure a call: run = energy(backend.generate, prompts, max_new_tokens=64); run.energy_j.

    The call is repeated: warm-up, then ``--energy-rounds`` rounds with quiet gaps between them.
    """
    from pytest_llenergy.api import Energy

    return Energy(_llenergy_place)


@pytest.fixture
def energy_meter(_llenergy_measured: None, _llenergy_place: Place) -> Iterator[EnergyMeter]:
    """Measure stretches of a test: with energy_meter("load") as window: ...; window.energy_j."""
    from pytest_llenergy.api import EnergyMeter

    meter = EnergyMeter(_llenergy_place)
    yield meter
    meter.close()


@pytest.fixture
def workers(_llenergy_place: Place) -> Workers:
    """The ranks of this test: workers.run(fn, *args) calls fn on each and gives the results by rank."""
    from pytest_llenergy.api import Workers

    return Workers(_llenergy_place)


@pytest.fixture
def energy_model(request: pytest.FixtureRequest) -> str:
    """The model for the backend fixture; override it to choose another for a module or a test."""
    from pytest_llenergy.session import state_of

    return state_of(request.config).settings.model


@pytest.fixture(scope="session")
def _llenergy_backend(request: pytest.FixtureRequest) -> str:
    if not hasattr(request, "param"):
        from pytest_llenergy.errors import PlanError

        raise PlanError("a test runs once for each engine: name the fixture backend among its parameters")
    return str(request.param)


@pytest.fixture
def backend(
    request: pytest.FixtureRequest, _llenergy_backend: str, energy_model: str, _llenergy_place: Place
) -> BackendHandle:
    """One inference engine with a model; the test runs once for each engine that is available here.

    ``backend.generate(prompts, ...)`` generates; ``energy(backend.generate, ...)`` measures it.
    """
    from pytest_llenergy.api import backend_of

    return backend_of(request.node, _llenergy_place, _llenergy_backend, energy_model)


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """A small set of prompts of mixed length; --energy-prompts=FILE names another."""
    from pytest_llenergy.model.prompts import default_prompts, load_prompts
    from pytest_llenergy.session import state_of

    path = state_of(request.config).settings.prompts
    return default_prompts() if path is None else load_prompts(path)
