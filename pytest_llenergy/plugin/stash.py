# SPDX-License-Identifier: Apache-2.0
"""Stash keys and fixture names shared by the plugin's modules. Every run of pytest imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from pytest_llenergy.plugin.settings import settings_of

if TYPE_CHECKING:
    from pytest_llenergy.devices.lease import Lease

#: Environment variables at the start of the run, so that a test that changes them does not affect devices.
ENVIRONMENT = pytest.StashKey[Mapping[str, str]]()

#: The test whose body is running, if any.
ITEM_IN_CALL = pytest.StashKey[pytest.Item | None]()

#: Files that were skipped at collection, or failed, by their id; in runs that compare.
SKIPPED_FILES = pytest.StashKey[set[str]]()

#: Set on a test that requested energy, even if only by ``request.getfixturevalue``.
MEASURED = pytest.StashKey[bool]()

#: Set on a test that runs in a process of its own; and in that process, the lease that it was given.
ISOLATED = pytest.StashKey[bool]()
GIVEN_LEASE: pytest.StashKey[Lease] = pytest.StashKey()

#: What a test in a process of its own cannot do.
NO_TERMINAL = (
    "a debugger does not reach a test in a process of its own; @pytest.mark.gpus(..., isolate=False) runs it "
    "in pytest's process"
)

#: Private fixtures that lease devices, hold what measuring needs, and give the test a record. Every public
#: fixture depends on them, so users may wrap or override public fixtures under any name.
LEASE, CONTEXT, MEASURING = "_llenergy_lease", "_llenergy_context", "_llenergy_measured"

#: The fixture that measures a call.
ENERGY = "energy"

#: The fixture of pytest-benchmark, and its name as a plugin.
BENCHMARK = "benchmark"

#: The fixture whose parameter names the backend of a test.
BACKEND_PARAMETER = "_llenergy_backend"

#: Fixtures that start ranks: devices and degrees of parallelism of the test are those of its ranks.
RANK_FIXTURES = (BACKEND_PARAMETER, "workers")


def uses_fixture(item: pytest.Item, name: str) -> bool:
    """Whether a test uses a fixture, according to its signature and marks."""
    return name in getattr(item, "fixturenames", ())


def uses_energy(item: pytest.Item) -> bool:
    """Whether a test uses ``energy`` or ``energy_meter``."""
    return uses_fixture(item, MEASURING) or item.stash.get(MEASURED, False)


def is_measured(item: pytest.Item) -> bool:
    """Whether a test uses energy in a run that measures, and therefore has a record, whatever its outcome."""
    return uses_energy(item) and not settings_of(item.config).measures_nothing


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def distributes_tests(config: pytest.Config) -> bool:
    """Whether this process is a controller of pytest-xdist, decided as xdist does, before workers exist."""
    distributed = config.getoption("dist", "no") != "no" and config.getoption("tx", None)
    return bool(distributed) and not config.option.collectonly
