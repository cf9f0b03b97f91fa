# SPDX-License-Identifier: Apache-2.0
"""Ranks on another host, as pytest controls them through its agent (see ``rank_service``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts.client import AgentClient
from pytest_llenergy.hosts.meeting import Offer, arrange_meetings
from pytest_llenergy.hosts.rank_service import LeaseAnswer
from pytest_llenergy.hosts.timeouts import AUTHENTICATION_TIMEOUT_S
from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.host import StartedRank, StartMethod
from pytest_llenergy.ranks.plan import ProcessPlan

#: Time limit for an answer about ranks. The agent may have to wait for its supervisor.
ANSWER_TIMEOUT_S = timeouts.SUPERVISOR_ANSWER_TIMEOUT_S + timeouts.GROUP_KILL_TIMEOUT_S


class RemoteHost:
    """A ``Host`` with an agent.

    Args:
        client: Its agent.
        start_method: How ranks start.
        logs: Directory on that host which keeps the output of the ranks, below the name of the host: several
            hosts may share it.
    """

    def __init__(self, client: AgentClient, start_method: StartMethod, logs: Path | None = None) -> None:
        self._client = client
        self.name = client.name
        self._start_method = start_method
        self._logs = None if logs is None else logs / client.name
        self._groups: set[str] = set()

    def call(self, verb: str, **arguments: Any) -> Any:
        """Return the answer to a request about ranks; raises as ``AgentClient.call`` does."""
        return self._client.call(f"ranks.{verb}", ANSWER_TIMEOUT_S, **arguments)

    def lease(
        self, request: GpuRequest | None, *, exclusive: bool, wait_s: float, busy_timeout_s: float, test: str
    ) -> LeaseAnswer:
        """Lease devices of the host for ranks that start from now on, instead of earlier ones.

        Args:
            request: The devices; None for the CPU.
            exclusive: Whether the test needs the host for itself.
            wait_s: How long to queue for them (seconds).
            busy_timeout_s: How long to wait for processes that use them without a lease (seconds).
            test: Its name, which other waiting processes show.

        Raises:
            DeviceError: The devices are not free in time, or the driver does not answer.
            WorkerError: The host is lost.
        """
        answer = self._client.call(
            "ranks.lease",
            wait_s + busy_timeout_s + ANSWER_TIMEOUT_S,
            request=msgspec.to_builtins(request),
            exclusive=exclusive,
            wait_s=wait_s,
            busy_timeout_s=busy_timeout_s,
            test=test,
        )
        return msgspec.convert(answer, LeaseAnswer)

    def await_free(self, timeout_s: float, waited_s: float) -> LeaseAnswer:
        """Wait longer for processes that use the leased devices without a lease; raises as ``lease`` does.

        Args:
            timeout_s: How long to wait (seconds).
            waited_s: How long pytest has waited for them before.
        """
        limit_s = timeout_s + ANSWER_TIMEOUT_S
        answer = self._client.call("ranks.await_free", limit_s, wait_s=timeout_s, waited_s=waited_s)
        return msgspec.convert(answer, LeaseAnswer)

    def release(self) -> None:
        """Release the devices, after the ranks have ended. Those of a lost host are free already."""
        with suppress(WorkerError):
            self.call("release")

    def usable_cpus(self) -> tuple[int, ...]:
        """Return the logical CPUs that ranks on the host may use; raises as ``call`` does."""
        return tuple(self.call("usable_cpus"))

    @property
    def lost(self) -> str | None:
        """See ``Host``."""
        return self._client.lost

    def to_local(self, time_ns: int) -> int:
        """See ``Host``."""
        return self._client.clock.to_local(time_ns)

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """See ``Host``."""
        self._groups.add(group)
        self._client.call(
            "ranks.prepare",
            timeout_s + ANSWER_TIMEOUT_S,
            group=group,
            environment=_encode_environment(environment),
            preload=list(preload),
            limit_s=timeout_s,
            start_method=self._start_method,
            logs=None if self._logs is None else str(self._logs),
            directory=_current_directory(),
            sys_path=[path or _current_directory() for path in sys.path if isinstance(path, str)],
        )

    def meet(
        self,
        group: str,
        plan: ProcessPlan,
        hosts: Mapping[str, RemoteHost],
        environment: Mapping[str, str],
    ) -> tuple[str, dict[str, dict[str, str]]]:
        """See ``Host``."""
        if len(hosts) > 1:
            return arrange_meetings(group, plan.nodes, hosts, environment)
        url, master = self.call("meet_here", group=group, ranks=len(plan.ranks))
        return url, {self.name: master}

    def offer_meeting(self, group: str) -> Offer:
        """See ``MeetingHost``."""
        return msgspec.convert(self.call("offer_meeting", group=group), Offer)

    def find_routes(self, offer: Offer) -> dict[str, str]:
        """See ``MeetingHost``."""
        return dict(self.call("find_routes", offer=msgspec.to_builtins(offer)))

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """See ``Host``. The rank runs under the lease of its own host; descriptors cannot cross."""
        variables = _encode_environment(environment)
        # The agent has the search path from ``prepare``.
        message = {**boot, "sys_path": None}
        pid, forked = self.call(
            "start", group=group, rank=rank, environment=variables, boot=message, python=python
        )
        # The agent has opened it already.
        connection = self._client.accept_rank(group, rank, AUTHENTICATION_TIMEOUT_S)
        return StartedRank(pid, forked, connection, partial(self._read_tail, group, rank))

    def _read_tail(self, group: str, rank: int) -> list[str]:
        lines: list[str] = []
        with suppress(WorkerError):
            lines = self.call("tail", group=group, rank=rank)
        return lines

    def exit_code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        code: int | None = self.call("exit_code", group=group, pid=pid)
        return code

    def write_stacks(self, group: str) -> None:
        """See ``Host``."""
        self.call("write_stacks", group=group)

    def kill(self, group: str) -> None:
        """See ``Host``. A lost host kills its ranks itself."""
        self._groups.discard(group)
        self.call("kill", group=group)

    def close(self) -> None:
        """See ``Host``. The agent stays."""
        for group in list(self._groups):
            with suppress(WorkerError):
                self.kill(group)
        self.release()


def _encode_environment(environment: Mapping[str, str]) -> bytes:
    """Return the variables as ``/proc/PID/environ`` has them: not all are valid text."""
    return os.fsencode("\0".join(f"{name}={value}" for name, value in environment.items()))


def _current_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
