# SPDX-License-Identifier: Apache-2.0
"""What a host must offer so that ranks can be started on it; see ``local`` for the one that pytest is on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

StartMethod = Literal["spawn", "forkserver"]


@dataclass(frozen=True)
class StartedRank:
    """A rank's process: its pid on its host, the way to talk to it, and the file that it prints to.

    ``forked`` tells a fork of a process with its libraries from a fresh interpreter.
    """

    pid: int
    forked: bool
    connection: Connection
    log: Path


class Host(Protocol):
    """Starts ranks, and ends them with all that came of them. All methods raise ``WorkerError``.

    A group is the ranks that end together; its name is the caller's choice.
    """

    def prepare(self, group: str, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """Make ready for a group whose ranks have this environment and these modules in common."""

    def rendezvous(self, group: str) -> str:
        """Where ranks meet, as an ``init_method`` of ``torch.distributed.init_process_group``."""

    def meeting(self, group: str) -> tuple[str, int]:
        """An address of this host that the ranks of all others reach, and a port of it that is free.

        Asked of the host of rank 0, for libraries that insist on ``MASTER_ADDR`` and ``MASTER_PORT``.
        """

    def directory(self, group: str) -> Path:
        """A private directory that pytest and the ranks of this host share, gone when the group is ended."""

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """Start a rank in exactly this environment.

        ``descriptors`` are those of the lease of GPUs, which lasts until nothing of the group is left.
        ``python`` is another interpreter than pytest's; with one nothing was preloaded.
        """

    def code(self, group: str, pid: int) -> int | None:
        """The exit code of a rank, negative for a signal; ``None`` while it runs."""

    def signal(self, group: str, number: int) -> None:
        """Send a signal to the ranks of a group that run."""

    def end(self, group: str) -> list[int]:
        """End a group and all its descendants. Returns the pids of those that are stuck in the kernel."""

    def close(self) -> None:
        """End everything."""
