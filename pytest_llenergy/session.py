# SPDX-License-Identifier: Apache-2.0
"""State of a run: settings, backends, meters, and the leases of its tests."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TypeVar

import pytest

from pytest_llenergy import marks
from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.backends.registry import load_backends, select_backends
from pytest_llenergy.backends.server.process import find_family
from pytest_llenergy.backends.server.settings import parse_local_url
from pytest_llenergy.devices.allocation import ShortageError, request_visible, select_devices
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease
from pytest_llenergy.devices.lockdir import explain_uncoordinated, open_lock_directory
from pytest_llenergy.devices.occupancy import wait_until_free
from pytest_llenergy.doctor.trial import run_trial
from pytest_llenergy.errors import (
    BackendError,
    DeviceError,
    LLEnergyError,
    MeterError,
    UncoordinatedLeaseWarning,
    WorkerError,
    WorkerPlacementError,
)
from pytest_llenergy.meters.base import MeterSpec
from pytest_llenergy.meters.select import BUILTIN, MeterRegistry
from pytest_llenergy.meters.select import check_names as check_meters
from pytest_llenergy.options import Settings, settings_of
from pytest_llenergy.plan import read_mark
from pytest_llenergy.progress import Progress
from pytest_llenergy.recorder import Draft, draft_of
from pytest_llenergy.stash import ENVIRONMENT
from pytest_llenergy.workers.leases import LeaseKeeper
from pytest_llenergy.workers.plan import ProcessPlan
from pytest_llenergy.workers.pool import RankPool

# What one pytest process holds: settings, known backends and meters, the ranks that wait for work.

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
        known = load_backends(given(self._config, "pytest_llenergy_backends", BackendSpec, BackendError))
        if known[server.SPEC.name] is server.SPEC:
            known[server.SPEC.name] = server.with_run_options(
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
        return select_backends(self.settings.backend, self.backends)

    @property
    def meters(self) -> Mapping[str, MeterSpec]:
        """Every known meter."""
        return MeterRegistry(given(self._config, "pytest_llenergy_meters", MeterSpec, MeterError))

    @cached_property
    def model(self) -> ModelSource:
        """The model that ``--energy-model`` names. Raises ``ModelError``."""
        return resolve_model(self.settings.model)

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
        root = find_family(parse_local_url(self.settings.server_url)).root
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
    def keeper(self) -> LeaseKeeper:
        """What this process has leased."""
        return LeaseKeeper(self.pool, lambda: open_lock_directory(self.environment))

    def warn_uncoordinated(self) -> None:
        """Say once if leases of GPUs are not seen by the whole host."""
        if self._warned:
            return
        self._warned = True
        directory = open_lock_directory(self.environment)
        directory.close()
        told = explain_uncoordinated(directory.path)
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
            parse_local_url(state.settings.server_url)
        check_meters(state.settings.meter, state.meters)
        chosen = state.selected_backends
        refusals = [spec.refuses(state.model) for spec in chosen]
        if state.settings.python:
            for spec in select_backends([name for name, _ in state.settings.python], state.backends):
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


# The devices of one test: chosen, locked, looked at, and given back.


@contextmanager
def leased(item: pytest.Item) -> Iterator[Lease]:
    """What a test asks for, its own until the block ends.

    Skips the test, with the reason, where there are fewer devices than it asks for. Raises ``DeviceError``
    when the driver or a board does not answer or ``--energy-gpus`` names what is not there, and when others
    still hold the devices after ``--energy-lease-timeout``, or use them after ``--energy-busy-timeout``.
    """
    state, draft = state_of(item.config), draft_of(item)
    wanted = draft.asked = read_mark(item, marks.gpus)
    # An earlier attempt may have had one.
    draft.lease = None
    try:
        # Without a mark, code in this process has what this process may use.
        here = wanted is None and draft.runs_here
        asked = request_visible(state.settings.gpus, state.environment) if here else wanted
        possible = select_devices(asked, state.settings.gpus, state.environment, warm=state.warm)
    except ShortageError as error:
        # The one reason that is nobody's mistake: this host has fewer GPUs. The record says so.
        pytest.skip(str(error))
    draft.fallback = possible.fallback
    if possible.uuids:
        state.warn_uncoordinated()
    draft.host_exclusive = not possible.uuids or state.measures_host
    # A test on GPUs is not alone on the host, except where a meter reads all of it; one on the CPU is.
    host = (DeviceLock(CPU, shared=not draft.host_exclusive),) if possible.uuids else ()
    began_s = time.monotonic()
    try:
        with state.progress.of(item.nodeid) as tell:
            lease = state.keeper.lease(possible, state.settings.lease_timeout, item.nodeid, host, tell)
    finally:
        # Also of a test that has waited in vain.
        draft.lease_wait_s = time.monotonic() - began_s
    try:
        draft.lease, draft.lease_intact = lease, state.keeper.is_intact
        with state.progress.of(item.nodeid) as tell:
            _await_others(lease, state, draft, tell)
        yield lease
    finally:
        state.keeper.finish_test()


def lease_first(item: pytest.Function, fixture: str) -> None:
    """Put the fixture of the lease before everything that is set up for this test alone.

    It is then torn down after all that: what another one starts on the devices must neither come before the
    lease nor outlive it.
    """
    # All tests of a function share one list.
    names = [name for name in item.fixturenames if name != fixture]
    first = next((place for place, name in enumerate(names) if _is_for_one_test(item, name)), len(names))
    item.fixturenames = [*names[:first], fixture, *names[first:]]


def _is_for_one_test(item: pytest.Function, name: str) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.get(name)
    return not fixtures or fixtures[-1].scope == "function"


def _await_others(lease: Lease, state: State, draft: Draft, tell: Callable[[str], None]) -> None:
    """Those who are on the boards without having asked for them."""
    settings = state.settings
    own = state.servers if lease.uuids else ()
    seen = wait_until_free(lease.uuids, settings.busy_timeout, own, tell=tell)
    draft.lease_wait_s = (draft.lease_wait_s or 0.0) + seen.waited_s
    draft.flags += seen.flags
    if seen.state == "busy":
        if settings.busy == "skip":
            # Only where the user asked for that; by default it is an error.
            pytest.skip(seen.message)
        raise DeviceError(seen.message)


# Why ranks did not even start: the doctor's steps, taken by themselves.

#: A run waits no longer than this for one step (seconds); ``llenergy doctor`` has more patience.
STEP_TIMEOUT_S = 60.0

REASON = "the ranks are on the CPU"


@contextmanager
def diagnosed(plan: ProcessPlan) -> Iterator[None]:
    """Say of ranks that failed before they were ready which step towards that fails here.

    Once a run for each device; the ranks have been ended, and their devices are still the test's.
    """
    try:
        yield
    except WorkerPlacementError:
        # This names its fault itself.
        raise
    except WorkerError as error:
        if error.before_ready and plan.framework == "torch":
            # A check that cannot be made must not hide the cause.
            with suppress(LLEnergyError, OSError):
                found = _sentence(plan.ranks[0].devices[0], len(plan.ranks) > 1)
                error.details = "\n".join(filter(None, (f"stepwise check: {found}", error.details)))
        raise


@cache
def _sentence(device: str, several: bool) -> str:
    on_gpu = device != CPU
    return run_trial(device if on_gpu else None, STEP_TIMEOUT_S, ranks=several, reason=REASON).sentence
