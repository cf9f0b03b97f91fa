# SPDX-License-Identifier: Apache-2.0
"""State of a run (settings, backends, meters, ranks), and the leases of its tests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_llenergy.backends import server
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import ModelSource, resolve_model
from pytest_llenergy.backends.registry import load_backends, select_backends
from pytest_llenergy.backends.server.process import ProcessFamily, find_running, find_running_pids
from pytest_llenergy.devices.inventory import find_gpus
from pytest_llenergy.devices.lease import CPU
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy.meters.base import MeterSpec
from pytest_llenergy.energy.meters.select import BUILTIN, ENTRY_POINTS, MeterRegistry
from pytest_llenergy.errors import BackendError, LLEnergyError, MeterError
from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.progress import Progress, progress_of
from pytest_llenergy.plugin.settings import settings_of
from pytest_llenergy.plugin.stash import ENVIRONMENT, is_worker
from pytest_llenergy.plugin.worker_gpus import WORKER_GPUS
from pytest_llenergy.ranks.leases import LeaseKeeper
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.ranks.transport import SUPERVISOR_VARIABLE
from pytest_llenergy.record.entry_points import LoadedEntryPoints, describe_error, load_entry_points
from pytest_llenergy.record.text import escape_surrogates

if TYPE_CHECKING:
    from pytest_llenergy.hosts.gangs import GangKeeper

#: Type of the specs that a hook returns.
Spec = TypeVar("Spec", BackendSpec, MeterSpec)


class RunState:
    """State of one pytest process during a run: settings, backends, meters, ranks and leases.

    Parts are created on first use.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self.settings = settings
        #: Environment of the process when the run began.
        self.environment: Mapping[str, str] = config.stash[ENVIRONMENT]
        #: The GPUs that ``--energy-worker-gpus`` gives this process.
        self.worker_gpus = config.stash.get(WORKER_GPUS, None)
        if is_worker(config):
            # Otherwise this process would notice only after five seconds that the controller was killed.
            die_with_parent(os.getppid())

    @property
    def is_ab_session(self) -> bool:
        """Whether ``llenergy ab`` started this run. It decides the rounds of each test."""
        return bool(self._config.getoption("llenergy_ab", False))

    @property
    def backends(self) -> dict[str, BackendSpec]:
        """Every backend by name. Calls the hook each time, since pytest may have loaded a nested conftest."""
        settings = self.settings
        hooked = call_spec_hook(self._config, "pytest_llenergy_backends", BackendSpec, BackendError)
        known = self._installed_backends | {spec.name: spec for spec in hooked}
        if known[server.SPEC.name] is server.SPEC:
            known |= server.specs_of_run(dict(settings.server), settings.timeout, settings.server_key_env)
        pythons = {name: str(path) for name, path in settings.python}
        return {name: replace(spec, python=pythons.get(name, spec.python)) for name, spec in known.items()}

    @cached_property
    def _installed_backends(self) -> dict[str, BackendSpec]:
        """Backends of this and other installed packages, for which every installed package is searched."""
        return load_backends()

    @property
    def selected_backends(self) -> list[BackendSpec]:
        """Backends that ``--energy-backend`` allows.

        Raises:
            BackendError: If a name is unknown.
        """
        return select_backends(self.settings.backend, self.backends)

    @property
    def meters(self) -> Mapping[str, MeterSpec]:
        """Every meter by name."""
        return MeterRegistry(self.hook_meters, installed=self._installed_meters)

    @property
    def hook_meters(self) -> list[MeterSpec]:
        """The meters of plugins and conftest files of this run."""
        return call_spec_hook(self._config, "pytest_llenergy_meters", MeterSpec, MeterError)

    @cached_property
    def _installed_meters(self) -> LoadedEntryPoints[MeterSpec]:
        """Meters of installed packages, for which every installed package is searched."""
        return load_entry_points(ENTRY_POINTS, MeterSpec)

    @cached_property
    def model(self) -> ModelSource:
        """The model that ``--energy-model`` names.

        Raises:
            ModelError: If there is no such model.
        """
        return resolve_model(self.settings.model)

    @property
    def threads(self) -> int | None:
        """Threads of each rank by ``OMP_NUM_THREADS``, or None for as many as it has cores."""
        given = self.environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return (int(given) or None) if given.isdecimal() else None

    @property
    def lease_timeout(self) -> float:
        """Longest wait for a device (seconds): none within a test, which may hold the device itself."""
        return 0.0 if SUPERVISOR_VARIABLE in self.environment else self.settings.lease_timeout

    @cached_property
    def progress(self) -> Progress:
        """Progress display of this process."""
        return progress_of(self._config)

    @cached_property
    def pool(self) -> RankPool:
        """Ranks that consecutive tests share."""
        settings = self.settings
        return RankPool(settings.timeout, settings.start_method, settings.isolation)

    def server_of(self, backend: str | None) -> ProcessFamily | None:
        """Return the processes of a backend's server that ran before; None for other backends."""
        return find_running(dict(self.settings.server).get(backend or "", ""))

    @property
    def servers(self) -> frozenset[int]:
        """Pids of the servers at the URLs of ``--energy-server``, which may use the devices of the tests."""
        return find_running_pids(dict(self.settings.server).values())

    @property
    def warm(self) -> frozenset[str]:
        """Devices on which ranks wait for the next test."""
        return self.pool.devices if "pool" in self.__dict__ else frozenset()

    def allowed_gpus(self, item: pytest.Item, wanted: GpuRequest | None) -> str | None:
        """Return the GPUs that a test may use, as ``--energy-gpus`` names them.

        In a session of ``llenergy ab`` these are the ones of earlier sessions, since others do not count.
        """
        known: Mapping[str, Sequence[str]] = self._config.getoption("llenergy_ab_devices", None) or {}
        devices = [device for device in known.get(escape_surrogates(item.nodeid), ()) if device != CPU]
        return ",".join(devices) if wanted is not None and len(devices) == wanted.n else self.settings.gpus

    @property
    def measures_host(self) -> bool:
        """Whether a test on GPUs uses a meter that reads more of the host than its GPUs."""
        meters = self.meters
        named = [name.partition(":")[0] for name in self.settings.meter]
        # No built-in meter that applies to GPUs by default reads more than GPUs.
        used = named or [name for name in meters if name not in BUILTIN and meters[name].by_default]
        return any(meters[name].host_wide for name in used)

    @cached_property
    def keeper(self) -> LeaseKeeper:
        """Leases that this process holds."""
        held = self.worker_gpus.held if self.worker_gpus is not None else None
        return LeaseKeeper(self.pool, lambda: open_lock_directory(self.environment), held)

    @cached_property
    def gangs(self) -> GangKeeper | None:
        """Leases on the hosts of ``--energy-cluster``; None for ``local``.

        Raises:
            PlanError: The cluster is not available here.
            WorkerError: It does not answer.
        """
        if self.settings.cluster == "local":
            return None
        from pytest_llenergy.hosts.gangs import GangKeeper, GangOptions, open_cluster

        cluster = open_cluster(self.settings.cluster, self.environment)
        # Workers of pytest-xdist would wait for hosts that idle ones keep.
        given = self.settings
        options = GangOptions(given.lease_timeout, given.busy_timeout, given.start_method)
        return GangKeeper(cluster, self.pool, options, keeps=not is_worker(self._config))

    @property
    def opened_gangs(self) -> GangKeeper | None:
        """The leases on other hosts, if a test has needed some."""
        return self.__dict__.get("gangs")

    def close(self) -> None:
        """Release every lease and stop all ranks."""
        # The next run of this process reads the GPUs anew.
        find_gpus.cache_clear()
        if "keeper" in self.__dict__:
            self.keeper.close()
        if "pool" in self.__dict__:
            self.pool.close()
        if (gangs := self.opened_gangs) is not None:
            gangs.close()


def call_spec_hook(
    config: pytest.Config, hook: str, kind: type[Spec], error: type[LLEnergyError]
) -> list[Spec]:
    """Return the specs that plugins provide through a hook, or raise ``error``."""
    try:
        answers = getattr(config.hook, hook)(config=config)
    except Exception as raised:  # the code belongs to another package and may raise anything
        raise error(f"{hook} raised {describe_error(raised)}") from raised
    for answer in answers:
        if not isinstance(answer, Sequence) or not all(isinstance(spec, kind) for spec in answer):
            raise error(f"{hook} returned {answer!r}: return a list of {kind.__name__}")
    return [spec for answer in answers for spec in answer]


STATE = pytest.StashKey[RunState]()


def state_of(config: pytest.Config) -> RunState:
    """Return the state of this process, created on first use."""
    state = config.stash.get(STATE, None)
    if state is None:
        state = config.stash[STATE] = RunState(config, settings_of(config))
        config.add_cleanup(state.close)
    return state
