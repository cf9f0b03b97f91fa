# SPDX-License-Identifier: Apache-2.0
"""Ranks and devices of an agent's host. The agent is the local client of the host's supervisor."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_llenergy.devices.allocation import ShortageError, list_leasable, select_devices
from pytest_llenergy.devices.board_settings import restore_left_changes
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.inventory import find_gpus
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import Held, acquire
from pytest_llenergy.devices.occupancy import wait_until_free
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.visibility import OVERRIDE
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.connection import Link
from pytest_llenergy.ranks.host import StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.record.environment import Board, Environment
from pytest_llenergy.record.record import Flag

if TYPE_CHECKING:
    from pytest_llenergy.energy.meters.select import MeterFacts

#: Variables that describe a host or its session. Ranks get those of their own host, and all others from
#: pytest's environment.
HOST_VARIABLES = frozenset(
    {
        *("HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "CUDA_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "LLENERGY_LOCK_DIR"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "XDG_RUNTIME_DIR"),
    }
)


@dataclass(frozen=True)
class LeaseAnswer:
    """Leased devices of a host, or why it has none for the test.

    Its ranks may use the logical ``cpus``. ``shortage`` is why it has fewer devices than requested, ``busy``
    which processes use the leased devices without a lease. A reader of the record must know the ``flags``.
    """

    lease: Lease = field(default=Lease(devices=()))
    cpus: Sequence[int] = ()
    shortage: str | None = None
    busy: str | None = None
    flags: Sequence[Flag] = ()


class AgentRanks:
    """Answers the calls ``ranks.*`` of an agent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._host: LocalHost | None = None
        #: By group and number: what returns the last lines of a rank.
        self._tails: dict[str, dict[int, Callable[[], list[str]]]] = {}
        self._held: Held | None = None
        self._search_path = list(sys.path)

    def close(self) -> None:
        """End the ranks, free the devices."""
        if self._host is not None:
            self._host.close()
        self.release()

    def environment(self) -> Environment:
        """Return machine and packages, for the record."""
        # Not at the top, as below: a lease should not wait for what only other calls need.
        from pytest_llenergy.devices.environment import collect_environment

        return collect_environment()

    def inventory(self) -> tuple[Sequence[Board], Sequence[MeterFacts]]:
        """Return GPUs in PCI order and meters, for ``llenergy doctor``. That takes seconds."""
        from pytest_llenergy.energy.meters.base import Targets
        from pytest_llenergy.energy.meters.select import list_meters

        gpus = find_gpus()
        uuids = sorted(list_leasable(gpus, None, os.environ).uuids, key=gpus.index)
        targets = [Targets(), *(Targets((uuid,)) for uuid in uuids)]
        return [*map(gpus.device, uuids)], [each for one in targets for each in list_meters(one)]

    # Devices

    def lease(
        self, request: GpuRequest | None, exclusive: bool, wait_s: float, busy_timeout_s: float, test: str
    ) -> LeaseAnswer:
        """Lease devices for ranks that start from now on, instead of earlier ones.

        It waits ``wait_s`` in the queue, and ``busy_timeout_s`` for processes without a lease. ``exclusive``
        is whether the ``test`` needs the host for itself. Raises ``DeviceError`` if they do not become free.
        """
        self.release()
        try:
            possible = select_devices(request)
        except ShortageError as error:
            # The option is refused together with a cluster, whose launcher sets the environment.
            return LeaseAnswer(shortage=str(error).replace(f"; {OVERRIDE}", ""))
        # Launchers list them in any order; all runs take them in that of the PCI addresses.
        ordered = sorted(possible.choices, key=lambda choice: choice.indices)
        possible = replace(possible, order=tuple(choice.devices[0] for choice in ordered))
        host = (DeviceLock(CPU, shared=not exclusive),) if possible.uuids else ()
        self._held = acquire(possible.request(host), wait_s, test)
        lease = possible.select(self._held.chosen)
        with closing(open_lock_directory()) as directory:
            restore_left_changes(directory, lease.uuids)
        occupancy = wait_until_free(lease.uuids, busy_timeout_s)
        busy = occupancy.message if occupancy.state == "busy" else None
        return LeaseAnswer(lease, tuple(usable_cpus()), busy=busy, flags=occupancy.flags)

    def release(self) -> None:
        """Release the devices."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    # Ranks

    def prepare(
        self,
        group: str,
        environment: Mapping[str, str],
        preload: Sequence[str],
        timeout_s: float,
        start_method: StartMethod,
        directory: str,
        sys_path: Sequence[str],
    ) -> None:
        """See ``Host``. Ranks get the directory and search path of pytest, as far as they exist here."""
        if self._host is None:
            self._host = LocalHost(start_method)
        with suppress(OSError):
            os.chdir(directory)
        own = [path for path in self._search_path if path not in sys_path]
        sys.path[:] = [*filter(os.path.exists, sys_path), *own]
        self._host.prepare(group, _on_this_host(environment), preload, timeout_s)

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        python: str | None,
        channel: int,
    ) -> tuple[int, bool]:
        """Start a rank, whose bytes cross on a channel. Returns its pid, and whether it is a fork."""
        if python is not None and not os.access(python, os.X_OK):
            raise WorkerError(f"has no interpreter {python}, which the backend runs in")
        boot = {**boot, "sys_path": None if python is not None else sys.path}
        lease = () if self._held is None else self._held.lend_descriptors()
        started = self._local.start(group, rank, _on_this_host(environment), boot, lease, python)
        self._tails.setdefault(group, {})[rank] = started.tail
        self._link.attach(channel, started.connection)
        return started.pid, started.forked

    def __getattr__(self, name: str) -> Any:
        """Return a method of ``LocalHost``."""
        return getattr(self._local, name)

    def free_ports(self) -> list[int]:
        """Return two ports for the ranks of several hosts."""
        probes = [socket.create_server(("", 0)) for _ in range(2)]
        ports = [int(each.getsockname()[1]) for each in probes]
        for each in probes:
            each.close()
        return ports

    def interface_to(self, address: str) -> str | None:
        """Return the interface that packets to an address leave by."""
        import psutil

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == own for each in addresses):
                return name
        # The whole network 127.0.0.0/8 is the loopback interface's.
        return "lo" if own.startswith("127.") else None

    def tail(self, group: str, rank: int) -> list[str]:
        """Return the last lines of a rank."""
        return self._tails[group][rank]()

    def kill(self, group: str) -> None:
        """See ``Host``."""
        self._tails.pop(group, None)
        if self._host is not None:
            self._host.kill(group)

    @property
    def _local(self) -> LocalHost:
        if self._host is None:
            raise WorkerError("ranks were not prepared")
        return self._host


def _on_this_host(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks: pytest's, except for those that describe a host."""
    shared = {name: value for name, value in environment.items() if name not in HOST_VARIABLES}
    return shared | {name: value for name, value in os.environ.items() if name in HOST_VARIABLES}
