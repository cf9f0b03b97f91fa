# SPDX-License-Identifier: Apache-2.0
"""What one pytest process holds: settings, known backends and meters, the ranks that wait for work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import pytest

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.model import ModelSource, resolve
from pytest_llenergy.backends.registry import known_backends, select
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.meters.known import KnownMeters
from pytest_llenergy.meters.protocol import MeterSpec
from pytest_llenergy.meters.select import check_names as check_meters
from pytest_llenergy.options import SETTINGS, Settings
from pytest_llenergy.workers.pool import RankPool


class State:
    """Made on first use; costs nothing in a run that measures nothing."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self.settings = settings

    @property
    def backends(self) -> dict[str, BackendSpec]:
        """Every known backend. Hooks are asked anew: a nested conftest may have joined."""
        given = self._config.hook.pytest_llenergy_backends(config=self._config)
        return known_backends([spec for specs in given for spec in specs])

    @property
    def selected_backends(self) -> list[BackendSpec]:
        """Those that ``--energy-backend`` allows. Raises ``BackendError`` for an unknown name."""
        return select(self.settings.backend, self.backends)

    @property
    def meters(self) -> Mapping[str, MeterSpec]:
        """Every known meter."""
        given = self._config.hook.pytest_llenergy_meters(config=self._config)
        return KnownMeters([spec for specs in given for spec in specs])

    @cached_property
    def model(self) -> ModelSource:
        """The model that ``--energy-model`` names. Raises ``ModelError``."""
        return resolve(self.settings.model)

    @cached_property
    def pool(self) -> RankPool:
        """Ranks that consecutive tests share."""
        return RankPool(self.settings.timeout)

    def close(self) -> None:
        """End ranks that are still there."""
        if "pool" in self.__dict__:
            self.pool.close()


STATE = pytest.StashKey[State]()


def state_of(config: pytest.Config) -> State:
    """The state of this process."""
    if STATE not in config.stash:
        config.stash[STATE] = State(config, config.stash[SETTINGS])
    return config.stash[STATE]


def check_names(config: pytest.Config) -> None:
    """Raises ``pytest.UsageError`` when the options name a model, backend or meter that cannot be."""
    state = state_of(config)
    try:
        check_meters(state.settings.meter, state.meters)
        chosen = state.selected_backends
        refusals = [spec.refuses(state.model) for spec in chosen]
    except LLEnergyError as error:
        raise pytest.UsageError(str(error)) from None
    if state.settings.model and all(refusals):
        raise pytest.UsageError(f"--energy-model: {'; '.join(filter(None, refusals))}")


def close(config: pytest.Config) -> None:
    """End what the run has started."""
    if STATE in config.stash:
        config.stash[STATE].close()
