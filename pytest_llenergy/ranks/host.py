# SPDX-License-Identifier: Apache-2.0
"""The protocol of a host that ranks can run on; ``local`` implements it for the host of pytest itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_llenergy.ranks.meeting import Offer, Routes
from pytest_llenergy.ranks.transport import Channel


class RankLog(Protocol):
    """What a rank prints, in a file of its host."""

    def mark(self) -> None:
        """Let the output of the next request begin here."""

    def tail(self) -> list[str]:
        """Return the last lines since the mark; empty if the log is gone."""


@dataclass(frozen=True)
class StartedRank:
    """The process of a rank: its pid on its host, pytest's end of the connection to it, and its log.

    ``forked`` distinguishes a fork of a process with preloaded libraries from a fresh interpreter.
    """

    pid: int
    forked: bool
    channel: Channel
    log: RankLog


class Host(Protocol):
    """Starts ranks, and kills them with all their descendants. All methods raise ``WorkerError``.

    A group consists of the ranks that are killed together; the caller chooses its name.
    """

    @property
    def lost(self) -> str | None:
        """Why nothing on this host can be reached any more, with its name; ``None`` as long as it can."""

    def to_local(self, time_ns: int) -> int:
        """Convert a reading of this host's monotonic clock to one of pytest's host (nanoseconds)."""

    def has_file(self, path: str) -> bool:
        """Return whether this host has the same file at the same path as pytest's host."""

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
        """Return where the ranks of a group meet if all are on this host.

        It is the ``init_method`` of ``torch.distributed.init_process_group``.
        """

    def master_address(self, group: str) -> tuple[str, int]:
        """Return an address of this host that its own ranks can reach, and a free port of it.

        Libraries need them as ``MASTER_ADDR`` and ``MASTER_PORT``.
        """

    def offer_meeting(self, group: str) -> Offer:
        """Listen for other hosts until a rank of the group starts. Called for the host of rank 0."""

    def find_routes(self, offer: Offer) -> Routes:
        """Return which of the addresses this host reaches, and through which own interface."""

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """Start a rank in exactly this environment.

        Args:
            group: The group that the rank belongs to, which was prepared before.
            rank: Its number.
            environment: All of its environment variables.
            boot: Its first message (see ``rank.main``), to which the host adds what differs between hosts.
            descriptors: Open files of the device lease, which lasts until no process of the group is left.
            python: An interpreter other than pytest's; nothing may be preloaded for such a group.
        """

    def exit_code(self, group: str, pid: int) -> int | None:
        """Return the exit code of a rank, negative for a signal, or ``None`` while it runs."""

    def write_stacks(self, group: str) -> Mapping[int, str]:
        """Let the ranks of a group write the stacks of their threads into their logs.

        Returns:
            For each rank that has written none, by its number, the reason.
        """

    def kill(self, group: str) -> list[int]:
        """Kill a group and all its descendants. Returns the pids that are stuck in the kernel."""

    def close(self) -> None:
        """Kill all groups and free all resources."""
