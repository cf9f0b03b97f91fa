# SPDX-License-Identifier: Apache-2.0
"""Ranks on the host of an agent: a ``LocalHost``, which pytest drives through the verbs ``ranks.*``."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.devices.allocation import ShortageError, select_devices
from pytest_llenergy.devices.board_settings import (
    GpuSettings,
    SettingsRefusedError,
    apply_settings,
    restore_left_changes,
)
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import CPU, DeviceLock, Lease
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.locks import Held, acquire
from pytest_llenergy.devices.occupancy import wait_until_free
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.devices.timeouts import ENDED_PROCESS_LISTED_S
from pytest_llenergy.devices.visibility import OVERRIDE
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.agent import AgentContext
from pytest_llenergy.hosts.meeting import Offer, find_routes, listen
from pytest_llenergy.hosts.rank_stream import relay
from pytest_llenergy.hosts.wire import Hello
from pytest_llenergy.ranks.host import StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.record.record import BoardSettings, Flag

#: Variables that describe a host or its session. Ranks get those of their own host, and all others from
#: pytest's environment.
HOST_VARIABLES = frozenset(
    {
        *("HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "CUDA_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "LLENERGY_LOCK_DIR"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "XDG_RUNTIME_DIR"),
    }
)


class LeaseAnswer(msgspec.Struct, frozen=True):
    """Leased devices of a host, or why it has none for the test.

    Attributes:
        lease: The devices.
        shortage: Why the host has fewer devices than requested, which is no fault.
        busy: Which other processes use the devices, which stay leased, without a lease.
        flags: What a reader of the record must know of the devices.
    """

    lease: Lease | None = None
    shortage: str | None = None
    busy: str | None = None
    flags: list[Flag] = []


class SettingsAnswer(msgspec.Struct, frozen=True):
    """Settings of the leased boards of a host, or why it allows no change."""

    boards: list[BoardSettings] = []
    refusal: str | None = None


class RankService:
    """Verbs ``ranks.*`` of an agent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._host: LocalHost | None = None
        #: By group and number: what returns the last lines of a rank.
        self._tails: dict[str, dict[int, Callable[[], list[str]]]] = {}
        #: Listens for the other hosts of a group.
        self._meetings: dict[str, socket.socket] = {}
        self._holding: Held | None = None
        self._lease_held = Lease(devices=())
        self._end_settings = ExitStack()
        self._search_path = list(sys.path)

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            "lease": self._lease,
            "await_free": lambda **arguments: msgspec.to_builtins(self._await_free(**arguments)),
            "release": self._release,
            "change_boards": self._change_boards,
            "restore_boards": self._restore_boards,
            "prepare": self._prepare,
            "meet_here": lambda **arguments: list(self._local.meet_here(**arguments)),
            "offer_meeting": self._offer_meeting,
            "find_routes": lambda offer: find_routes(msgspec.convert(offer, Offer)),
            "start": self._start,
            "exit_code": lambda group, pid: self._local.exit_code(group, pid),
            "tail": lambda group, rank: self._tails[group][rank](),
            "write_stacks": lambda group: self._local.write_stacks(group),
            "kill": self._kill,
            "usable_cpus": lambda: list(usable_cpus()),
        }

    def close(self) -> None:
        """See ``Service``."""
        try:
            # First, since little time is left.
            self._restore_boards()
        finally:
            if self._host is not None:
                self._host.close()
            self._release()

    @property
    def _local(self) -> LocalHost:
        if self._host is None:
            raise WorkerError("ranks were not prepared")
        return self._host

    def _lease(self, request: Any, exclusive: bool, wait_s: float, busy_timeout_s: float, test: str) -> Any:
        """Lease devices of this host for the ranks that start from now on. Returns a ``LeaseAnswer``."""
        self._release()
        return msgspec.to_builtins(
            self._lease_free(
                msgspec.convert(request, GpuRequest | None), exclusive, wait_s, busy_timeout_s, test
            )
        )

    def _lease_free(
        self, request: GpuRequest | None, exclusive: bool, wait_s: float, busy_timeout_s: float, test: str
    ) -> LeaseAnswer:
        try:
            possible = _in_pci_order(select_devices(request))
        except ShortageError as error:
            # The option is refused together with a cluster, whose launcher sets the environment.
            return LeaseAnswer(shortage=str(error).replace(f"; {OVERRIDE}", ""))
        host = (DeviceLock(CPU, shared=not exclusive),) if possible.uuids else ()
        self._holding = acquire(possible.request(host), wait_s, test)
        lease = self._lease_held = possible.select(self._holding.chosen)
        directory = open_lock_directory()
        try:
            restore_left_changes(directory, lease.uuids)
        finally:
            directory.close()
        return self._await_free(busy_timeout_s)

    def _await_free(self, wait_s: float, waited_s: float = 0.0) -> LeaseAnswer:
        """Wait for other processes on the leased boards, after an earlier wait of ``waited_s``."""
        lease = self._lease_held
        occupancy = wait_until_free(lease.uuids, wait_s)
        if occupancy.ending:
            occupancy = wait_until_free(lease.uuids, ENDED_PROCESS_LISTED_S)
        occupancy = replace(occupancy, waited_s=occupancy.waited_s + waited_s)
        busy = occupancy.message if occupancy.state == "busy" else None
        return LeaseAnswer(lease, busy=busy, flags=occupancy.flags)

    def _release(self) -> None:
        holding, self._holding = self._holding, None
        try:
            self._restore_boards()
        finally:
            if holding is not None:
                holding.release()

    def _change_boards(self, settings: Any) -> Any:
        """Apply settings to the leased boards until ``restore_boards``. Returns a ``SettingsAnswer``."""
        wanted, held = msgspec.convert(settings, GpuSettings), self._holding
        descriptors = () if held is None else held.lend_descriptors()
        with ExitStack() as end:
            directory = open_lock_directory()
            end.callback(directory.close)
            try:
                applying = apply_settings(wanted, self._lease_held, directory, descriptors)
                applied = end.enter_context(applying)
            except SettingsRefusedError as error:
                return msgspec.to_builtins(SettingsAnswer(refusal=str(error)))
            self._end_settings = end.pop_all()
        return msgspec.to_builtins(SettingsAnswer(applied))

    def _restore_boards(self) -> None:
        """Put the settings back, if any were changed."""
        end, self._end_settings = self._end_settings, ExitStack()
        end.close()

    def _prepare(
        self,
        group: str,
        environment: bytes,
        preload: list[str],
        limit_s: float,
        start_method: StartMethod,
        logs: str | None,
        directory: str,
        sys_path: list[str],
    ) -> None:
        if self._host is None:
            self._host = LocalHost(start_method, None if logs is None else Path(logs))
        # Ranks work in the directory of pytest and import from its search path, if this host has them.
        with suppress(OSError):
            os.chdir(directory)
        own = [path for path in self._search_path if path not in sys_path]
        sys.path[:] = [*filter(os.path.exists, sys_path), *own]
        with _failures_in_one_line():
            self._host.prepare(group, _decode_environment(environment), preload, limit_s)

    def _start(
        self, group: str, rank: int, environment: bytes, boot: dict[str, Any], python: str | None
    ) -> list[Any]:
        if python is not None and not os.access(python, os.X_OK):
            raise WorkerError(f"has no interpreter {python}, which the backend runs in")
        boot["sys_path"] = None if python is not None else sys.path
        variables = _decode_environment(environment)
        lease = () if self._holding is None else self._holding.lend_descriptors()
        with _failures_in_one_line():
            started = self._local.start(group, rank, variables, boot, lease, python)
        self._tails.setdefault(group, {})[rank] = started.tail
        connection = self._context.connect(Hello("rank", self._context.slot, group, rank))
        ends = (started.connection, connection)
        threading.Thread(target=relay, args=ends, name=f"rank{rank}", daemon=True).start()
        return [started.pid, started.forked]

    def _offer_meeting(self, group: str) -> Any:
        self._meetings[group], offer = listen()
        return msgspec.to_builtins(offer)

    def _kill(self, group: str) -> None:
        if (meeting := self._meetings.pop(group, None)) is not None:
            meeting.close()
        self._tails.pop(group, None)
        if self._host is not None:
            self._host.kill(group)


@contextmanager
def _failures_in_one_line() -> Iterator[None]:
    """Report a file that cannot be written, such as the log of a rank, without the code of the agent."""
    try:
        yield
    except OSError as error:
        raise WorkerError(f"its ranks cannot be started: {error}") from None


def _in_pci_order(possible: Lease) -> Lease:
    """Return a plan whose devices come in PCI order, in whatever order a launcher lists them."""
    ordered = sorted(possible.choices, key=lambda choice: choice.indices)
    return replace(possible, order=tuple(choice.devices[0] for choice in ordered))


def _decode_environment(environment: bytes) -> dict[str, str]:
    """Return the variables of ranks: pytest's, except for those that describe a host."""
    pairs = (each.partition("=") for each in os.fsdecode(environment).split("\0") if each)
    shared = {name: value for name, _, value in pairs if name not in HOST_VARIABLES}
    own = {name: value for name, value in os.environ.items() if name in HOST_VARIABLES}
    return {**shared, **own}
