# SPDX-License-Identifier: Apache-2.0
"""``--energy-worker-gpus=N``: GPUs that a pytest process, or a worker of pytest-xdist, has for all its tests.

They are leased and made visible before a conftest or a test can be imported, and stay leased until the end of
the process. The controller of pytest-xdist leases none.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import pytest

from pytest_llenergy.backends.server.process import find_running_pids
from pytest_llenergy.devices.allocation import count_leasable, select_devices
from pytest_llenergy.devices.board_settings import restore_left_changes
from pytest_llenergy.devices.lease import Lease, join_leases
from pytest_llenergy.devices.locks import Held, acquire
from pytest_llenergy.devices.occupancy import wait_until_free
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.visibility import visible_variables
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.options.table import Settings
from pytest_llenergy.plugin.settings import option_source, read_settings, settings_of, usage_error
from pytest_llenergy.plugin.stash import distributes_tests, is_worker
from pytest_llenergy.plugin.xdist import FAILURE as SENT_FAILURE
from pytest_llenergy.plugin.xdist import OPTIONS_WITHOUT_TESTS, worker_input_of
from pytest_llenergy.ranks.transport import SUPERVISOR_VARIABLE


@dataclass(frozen=True)
class WorkerGpus:
    """The GPUs of this process.

    Attributes:
        parts: A lease of each, in the order in which CUDA numbers them.
        selection: Value of ``--energy-gpus``.
        environment: The environment before they were made visible.
        skip: Why tests that use them are skipped: others do, with ``--energy-busy=skip``.
    """

    parts: tuple[Lease, ...]
    held: Held
    selection: str | None
    environment: Mapping[str, str]
    skip: str | None = None

    @property
    def lease(self) -> Lease:
        """All of them."""
        return join_leases(self.parts)

    def choose(self, request: GpuRequest) -> Lease:
        """Return the first of them that a test can use, or its fallback.

        Raises:
            ShortageError: The host has no such GPUs.
            DeviceError: Only other GPUs of the host are such.
        """
        if replace(request, fallback=None) == GpuRequest(request.n):
            return join_leases(self.parts[: request.n])
        anywhere = select_devices(request, self.selection, self.environment)
        if anywhere.fallback is not None:
            return anywhere
        fitting = [part for part in self.parts if part.devices[0] in anywhere.order]
        if len(fitting) < request.n:
            own = ", ".join(f"{board.name} {board.uuid}" for board in self.lease.boards)
            raise DeviceError(
                f"{request}: this process has {own} (--energy-worker-gpus); choose GPUs that fit with "
                "--energy-gpus, or run this test without --energy-worker-gpus"
            )
        return join_leases(fitting[: request.n])


WORKER_GPUS = pytest.StashKey[WorkerGpus]()

#: Why a worker of pytest-xdist has none, until its controller can hear of it.
FAILURE = pytest.StashKey[str]()


def lease_early(config: pytest.Config) -> None:
    """Lease the GPUs of this process before any conftest is loaded, unless it seems to be a controller.

    Raises:
        pytest.UsageError: An option has an invalid value, or this process gets no such GPUs.
    """
    known = copy.copy(config)
    # The options are in place only after the conftest files, which may add some.
    known.option = config.known_args_namespace
    # pytest-xdist gives its workers the arguments of the controller.
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not in_worker and (known.getoption("numprocesses", None) or known.getoption("dist", "no") != "no"):
        return
    try:
        _lease(known, read_settings(known))
    except pytest.UsageError as error:
        if not in_worker:
            raise
        # pytest-xdist would replace a worker that ends now, again and again.
        config.stash[FAILURE] = str(error)
        _show_only(config, "")


def check_or_lease(config: pytest.Config) -> None:
    """Check that there are enough GPUs for all workers of pytest-xdist, or lease those of this process.

    Raises:
        pytest.UsageError: There are not.
    """
    settings = settings_of(config)
    if FAILURE in config.stash:
        if not is_worker(config):
            raise pytest.UsageError(config.stash[FAILURE])
        worker_input_of(config).send(SENT_FAILURE, config.stash[FAILURE])
    elif is_worker(config) or not distributes_tests(config):
        if WORKER_GPUS not in config.stash:
            _lease(config, settings)
    else:
        _check_workers(config, settings)


def _check_workers(config: pytest.Config, settings: Settings) -> None:
    # A worker on another host, or in another directory, counts its own.
    workers, n = list(config.option.tx).count("popen"), settings.worker_gpus or 0
    with _as_usage_error(config, n):
        usable = count_leasable(settings.gpus)
        if usable < n:
            select_devices(GpuRequest(n), settings.gpus)
        if workers * n > usable:
            raise DeviceError(
                f"{workers} workers need {workers * n} GPUs, and {usable} may be used here; start at most "
                f"{usable // n}, or -n auto"
            )


def _lease(config: pytest.Config, settings: Settings) -> None:
    # A pytest in a rank has the GPUs of the rank.
    in_rank = SUPERVISOR_VARIABLE in os.environ
    if in_rank or any(config.getoption(name, default=False) for name in OPTIONS_WITHOUT_TESTS):
        return
    n, environment = settings.worker_gpus or 0, dict(os.environ)
    with _as_usage_error(config, n):
        if settings.cluster != "local":
            raise DeviceError("the GPUs are those of this host; leave it out with a cluster")
        possible = select_devices(GpuRequest(n), settings.gpus, environment)
        held = acquire(
            possible.request(), settings.lease_timeout, f"--energy-worker-gpus={n}", on_wait=_show_wait
        )
        config.add_cleanup(held.release)
        lease = possible.select(held.chosen)
        servers = find_running_pids(dict(settings.server).values())
        occupancy = wait_until_free(lease.uuids, settings.busy_timeout, servers, _show_wait)
        if occupancy.state == "busy" and settings.busy == "fail":
            raise DeviceError(occupancy.message)
        restore_left_changes(held.directory, lease.uuids)
    by_device = {choice.devices[0]: choice for choice in possible.choices}
    parts = tuple(by_device[device] for device in lease.devices)
    skip = occupancy.message if occupancy.state == "busy" else None
    config.stash[WORKER_GPUS] = WorkerGpus(parts, held, settings.gpus, environment, skip)
    _show_only(config, lease.uuids)


def _show_only(config: pytest.Config, uuids: Sequence[str]) -> None:
    """Show these GPUs to what this process imports and starts, until the run ends."""
    patch = pytest.MonkeyPatch()
    # Otherwise torch.cuda.is_available() would initialise CUDA.
    for name, value in {**visible_variables(uuids), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}.items():
        patch.setenv(name, value)
    config.add_cleanup(patch.undo)


@contextmanager
def _as_usage_error(config: pytest.Config, n: int) -> Iterator[None]:
    try:
        yield
    except DeviceError as error:
        message = str(error).removeprefix(f"{GpuRequest(n)}: ")
        raise usage_error(f"{option_source(config, 'worker_gpus')}={n}: {message}") from None


# Once for each holder.
@cache
def _show_wait(text: str) -> None:
    sys.stderr.write(f"energy: {text}\n")
    sys.stderr.flush()
