# SPDX-License-Identifier: Apache-2.0
"""The fixtures, each with a first line that ``pytest --fixtures`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # Defining fixtures costs every run; what they are made of is imported by the first test that asks.
    from pytest_llenergy.devices.lease import Lease
    from pytest_llenergy.handles import BackendHandle, Place, Workers
    from pytest_llenergy.model.prompts import Prompts
    from pytest_llenergy.runs import Energy, EnergyMeter

#: What every fixture that measures asks for, so that users' own names and overrides cannot deceive.
MEASURING = "_llenergy_measured"

#: The fixture that takes the lease, for the same reason. ``gpus`` hands it out.
LEASE = "_llenergy_lease"

#: Set once a test has asked for energy, also where it did so by ``request.getfixturevalue``.
MEASURED = pytest.StashKey[bool]()

#: The fixture whose parameter names the backend of a test.
BACKEND_PARAMETER = "_llenergy_backend"


class Ever:
    """Whether any test of this process has asked for energy."""

    measured = False


def is_measured(item: pytest.Item) -> bool:
    """Whether a test asks for energy. It then has a record, whatever becomes of it."""
    # ``get`` would raise and catch an error for every test that asks for nothing.
    asked = MEASURING in getattr(item, "fixturenames", ()) or (
        MEASURED in item.stash and item.stash[MEASURED]
    )
    Ever.measured |= asked
    return asked


def was_measured(item: pytest.Item) -> bool:
    """The same, of a test that has been set up. Costs nothing where none has ever asked."""
    return Ever.measured and is_measured(item)


@pytest.fixture
def _llenergy_lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    from pytest_llenergy.leasing import leased

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
    from pytest_llenergy import marks
    from pytest_llenergy.handles import Place
    from pytest_llenergy.recorder import draft_of
    from pytest_llenergy.state import state_of

    item = request.node
    degrees = marks.read(item, marks.parallel)
    place = Place(state_of(request.config), _llenergy_lease, degrees, draft_of(item), item.nodeid)
    yield place
    place.end()


@pytest.fixture
def _llenergy_measured(request: pytest.FixtureRequest) -> None:
    if not is_measured(request.node):
        # It asks for it as it runs.
        from pytest_llenergy.recorder import announce

        announce(request.node)
    request.node.stash[MEASURED] = Ever.measured = True


@pytest.fixture
def energy(_llenergy_measured: None, _llenergy_place: Place) -> Energy:
    """Measure a call: run = energy(backend.generate, prompts, max_new_tokens=64); run.energy_j.

    The call is repeated: warm-up, then ``--energy-rounds`` rounds with quiet gaps between them.
    """
    from pytest_llenergy.runs import Energy

    return Energy(_llenergy_place)


@pytest.fixture
def energy_meter(_llenergy_measured: None, _llenergy_place: Place) -> Iterator[EnergyMeter]:
    """Measure stretches of a test: with energy_meter("load") as window: ...; window.energy_j."""
    from pytest_llenergy.runs import EnergyMeter

    meter = EnergyMeter(_llenergy_place)
    yield meter
    meter.close()


@pytest.fixture
def workers(_llenergy_place: Place) -> Workers:
    """The ranks of this test: workers.run(fn, *args) calls fn on each and gives the results by rank."""
    from pytest_llenergy.handles import Workers

    return Workers(_llenergy_place)


@pytest.fixture
def energy_model(request: pytest.FixtureRequest) -> str:
    """The model for the backend fixture; override it to choose another for a module or a test."""
    from pytest_llenergy.state import state_of

    return state_of(request.config).settings.model


@pytest.fixture(scope="session")
def _llenergy_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(
    request: pytest.FixtureRequest, _llenergy_backend: str, energy_model: str, _llenergy_place: Place
) -> BackendHandle:
    """One inference engine with a model; the test runs once for each engine that is available here.

    ``backend.generate(prompts, ...)`` generates; ``energy(backend.generate, ...)`` measures it.
    """
    from pytest_llenergy import marks
    from pytest_llenergy.backends.model import resolve
    from pytest_llenergy.handles import BackendHandle

    state = _llenergy_place.state
    spec = state.backends[_llenergy_backend]
    model = resolve(energy_model)
    refused = spec.refuses(model)
    if refused is None and _llenergy_place.lease.uuids and not spec.capabilities.gpu:
        refused = f"{spec.name} does not run on GPUs here"
    if refused is None and not _llenergy_place.lease.uuids and not spec.capabilities.cpu:
        why = spec.capabilities.reasons.get("cpu", "")
        refused = f"{spec.name} does not run on the CPU here{f' ({why})' if why else ''}"
    if refused is not None:
        pytest.skip(refused)
    options = marks.read(request.node, marks.backend_options)
    return BackendHandle(spec, model, _llenergy_place, dict(options or {}))


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """A small set of prompts of mixed length; --energy-prompts=FILE names another."""
    from pytest_llenergy.model.prompts import default_prompts, read_prompts
    from pytest_llenergy.state import state_of

    path = state_of(request.config).settings.prompts
    return default_prompts() if path is None else read_prompts(path)
