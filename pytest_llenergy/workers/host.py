# SPDX-License-Identifier: Apache-2.0
"""The protocol of a host that ranks can run on; ``local`` implements it for the host of pytest itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StartedRank:
    """The process of a rank: its pid on its host, the connection to it, and the file that it prints to.

    ``forked`` distinguishes a fork of a process with preloaded libraries from a fresh interpreter.
    """

    pid: int
    forked: bool
    connection: Connection
    log: Path


class Host(Protocol):
    """Starts ranks, and kills them with all their descendants. All methods raise ``WorkerError``.

    A group consists of the ranks that are killed together; the caller chooses its name.
    """

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """Prepare for a group whose ranks share this environment and these preloaded modules.

        Args:
            group: Name of the group.
            environment: Variables that all its ranks share, and others.
            preload: Modules that are imported once for all ranks.
            timeout_s: Time limit for the imports (seconds).
        """

    def sentinels(self, group: str) -> list[int]:
        """Return descriptors that become readable when a process that watches over a group has ended.

        The ranks of the group end with it.
        """

    def rendezvous_url(self, group: str) -> str:
        """Return the ``init_method`` of ``torch.distributed.init_process_group`` for a group."""

    def master_address(self, group: str) -> tuple[str, int]:
        """Return an address of this host that the ranks of all hosts can reach, and a free port of it.

        Called for the host of rank 0, for libraries that need ``MASTER_ADDR`` and ``MASTER_PORT``.
        """

    def directory(self, group: str) -> Path:
        """Return a private directory shared by pytest and the ranks of this host, removed with the group."""

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """Start a rank in exactly this environment.

        Args:
            group: The group that the rank belongs to, which was prepared before.
            rank: Its number.
            environment: All of its environment variables.
            descriptors: Open files of the device lease, which lasts until no process of the group is left.
            python: An interpreter other than pytest's; nothing may be preloaded for such a group.
        """

    def exit_code(self, group: str, pid: int) -> int | None:
        """Return the exit code of a rank, negative for a signal, or ``None`` while it runs."""

    def send_signal(self, group: str, number: int) -> None:
        """Send a signal to the running ranks of a group."""

    def kill(self, group: str) -> list[int]:
        """Kill a group and all its descendants. Returns the pids that are stuck in the kernel."""

    def close(self) -> None:
        """Kill all groups and free all resources."""
