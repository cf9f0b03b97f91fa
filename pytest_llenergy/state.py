# SPDX-License-Identifier: Apache-2.0
"""What one pytest process holds: settings, known backends and meters, the ranks that wait for work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import pytest

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.model import ModelSource, resolve
from pytest_llenergy.backends.registry import known_backends, select
from pytest_llenergy.backends.server import spec as server
from pytest_llenergy.backends.server.attached import family_at
from pytest_llenergy.backends.server.settings import local_address
from pytest_llenergy.devices.container import uncoordinated
from pytest_llenergy.devices.lockdir import lock_directory
from pytest_llenergy.errors import BackendError, LLEnergyError, MeterError, UncoordinatedLeaseWarning
from pytest_llenergy.meters.known import BUILTIN, KnownMeters
from pytest_llenergy.meters.protocol import MeterSpec
from pytest_llenergy.meters.select import check_names as check_meters
from pytest_llenergy.options.settings import Settings, settings_of
from pytest_llenergy.process import ENVIRONMENT
from pytest_llenergy.progress import Progress
from pytest_llenergy.workers.keeper import Keeper
from pytest_llenergy.workers.pool import RankPool

#: What a hook is to give.
Spec = TypeVar("Spec", BackendSpec, MeterSpec)


class State:
    """Made on first use; costs nothing in a run that measures nothing. ``before`` is that of a parent."""

    def __init__(self, config: pytest.Config, settings: Settings, before: State | None = None) -> None:
        self._config = config
        # Kept, as what goes with it would end itself, and it is not for this process to end.
        self._before = before
        #: The process whose it is.
        self.pid: int = os.getpid()
        self.settings = settings
        #: As it was when the run began, whatever tests have set since.
        self.environment: Mapping[str, str] = config.stash[ENVIRONMENT]
        self._warned = False

    @property
    def backends(self) -> dict[str, BackendSpec]:
        """Every known backend. Hooks are asked anew: a nested conftest may have joined."""
        told = self.settings
        known = known_backends(given(self._config, "pytest_llenergy_backends", BackendSpec, BackendError))
        if known[server.SPEC.name] is server.SPEC:
            known[server.SPEC.name] = server.configured(
                server.SPEC,
                told.server_command,
                told.server_url,
                told.server_health,
                told.server_model,
                told.timeout,
            )
        pythons = {name: str(path) for name, path in told.python}
        return {name: replace(spec, python=pythons.get(name, spec.python)) for name, spec in known.items()}

    @property
    def selected_backends(self) -> list[BackendSpec]:
        """Those that ``--energy-backend`` allows. Raises ``BackendError`` for an unknown name."""
        return select(self.settings.backend, self.backends)

    @property
    def meters(self) -> Mapping[str, MeterSpec]:
        """Every known meter."""
        return KnownMeters(given(self._config, "pytest_llenergy_meters", MeterSpec, MeterError))

    @cached_property
    def model(self) -> ModelSource:
        """The model that ``--energy-model`` names. Raises ``ModelError``."""
        return resolve(self.settings.model)

    @cached_property
    def progress(self) -> Progress:
        """What people see while they wait."""
        return Progress(self._config)

    @cached_property
    def pool(self) -> RankPool:
        """Ranks that consecutive tests share."""
        settings = self.settings
        return RankPool(settings.timeout, settings.start_method, settings.isolation, settings.rank_logs)

    @property
    def servers(self) -> frozenset[int]:
        """A server that ran before the tests and that they are to measure: no stranger to their devices."""
        if self.settings.server_command or not self.settings.server_url:
            return frozenset()
        root = family_at(local_address(self.settings.server_url)).root
        return frozenset(() if root is None else (root,))

    @property
    def warm(self) -> frozenset[str]:
        """Devices on which ranks wait for the next test."""
        return self.pool.devices if "pool" in self.__dict__ else frozenset()

    @property
    def measures_host(self) -> bool:
        """Whether a test on GPUs is measured by a meter that reads more of the host than these."""
        meters = self.meters
        named = [name.partition(":")[0] for name in self.settings.meter]
        # Of those that come with the package none applies to GPUs by itself and reads more.
        used = named or [name for name in meters if name not in BUILTIN and meters[name].by_default]
        return any(meters[name].host_wide for name in used)

    @cached_property
    def keeper(self) -> Keeper:
        """What this process has leased."""
        return Keeper(self.pool, lambda: lock_directory(self.environment))

    def warn_uncoordinated(self) -> None:
        """Say once if leases of GPUs are not seen by the whole host."""
        if self._warned:
            return
        self._warned = True
        directory = lock_directory(self.environment)
        directory.close()
        told = uncoordinated(directory.path)
        if told is not None:
            warnings.warn(told, UncoordinatedLeaseWarning, stacklevel=2)

    def close(self) -> None:
        """End ranks that are still there, then give back what is leased."""
        if "keeper" in self.__dict__:
            self.keeper.close()
        if "pool" in self.__dict__:
            self.pool.close()


def given(config: pytest.Config, hook: str, kind: type[Spec], refusal: type[LLEnergyError]) -> list[Spec]:
    """What plugins give by a hook. Raises ``refusal`` that names the plugin which gives something else."""

    def fits(answer: object) -> bool:
        return isinstance(answer, Sequence) and all(isinstance(spec, kind) for spec in answer)

    answers = getattr(config.hook, hook)(config=config)
    if all(map(fits, answers)):
        return [spec for answer in answers for spec in answer]
    manager, wrong = config.pluginmanager, []
    # An answer does not say whose it is, so each is asked alone.
    for plugin in manager.get_plugins():
        others = [other for other in manager.get_plugins() if other is not plugin]
        alone = manager.subset_hook_caller(hook, others)(config=config)
        wrong += [f"{manager.get_name(plugin)} gives {answer!r}" for answer in alone if not fits(answer)]
    raise refusal(f"{hook} of {'; '.join(wrong)}: return a list, each of it a {kind.__name__}")


STATE = pytest.StashKey[State]()


def state_of(config: pytest.Config) -> State:
    """The state of this process; in a fork of it that runs a test a new one, beside that of its parent."""
    before = config.stash.get(STATE, None)
    if before is None or before.pid != os.getpid():
        config.stash[STATE] = State(config, settings_of(config), before)
    if before is None:
        config.add_cleanup(partial(_close, config))
    return config.stash[STATE]


def check_names(config: pytest.Config) -> None:
    """Raises ``pytest.UsageError`` when the options name a model, backend or meter that cannot be."""
    state = state_of(config)
    try:
        if state.settings.server_url:
            local_address(state.settings.server_url)
        check_meters(state.settings.meter, state.meters)
        chosen = state.selected_backends
        refusals = [spec.refuses(state.model) for spec in chosen]
        if state.settings.python:
            for spec in select([name for name, _ in state.settings.python], state.backends):
                # A module may be missing, which skips tests; the interpreter itself may not.
                spec.missing()
    except LLEnergyError as error:
        raise pytest.UsageError(str(error)) from None
    if state.settings.model and all(refusals):
        raise pytest.UsageError(f"--energy-model: {'; '.join(filter(None, refusals))}")


def leave_terminal(config: pytest.Config) -> None:
    """A debugger has it from now on."""
    if STATE in config.stash and "progress" in vars(config.stash[STATE]):
        config.stash[STATE].progress.leave()


def _close(config: pytest.Config) -> None:
    """End what the run has started, or a fork of it that goes on alone."""
    config.stash[STATE].close()
