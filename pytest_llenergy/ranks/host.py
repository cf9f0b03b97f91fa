# SPDX-License-Identifier: Apache-2.0
"""What ranks need of a host; ``local`` provides it for the host of pytest itself, ``hosts`` for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from pytest_llenergy.ranks.plan import ProcessPlan

StartMethod = Literal["spawn", "forkserver"]
"""How ranks start: as fresh interpreters, or as forks of a supervisor with the framework loaded."""


@dataclass(frozen=True)
class StartedRank:
    """The process of a rank: its pid on its host, pytest's end of the connection to it, and its output.

    ``forked`` distinguishes a fork of a process with preloaded libraries from a fresh interpreter. ``tail``
    returns the last lines that the rank printed, none if they are gone.
    """

    pid: int
    forked: bool
    connection: Connection
    tail: Callable[[], list[str]]


class Host(Protocol):
    """Starts ranks, and kills them with all their descendants. All methods raise ``WorkerError``.

    A group consists of the ranks that are killed together; the caller chooses its name.
    """

    @property
    def lost(self) -> str | None:
        """Why nothing on this host can be reached any more, with its name; ``None`` as long as it can."""
        return None

    def to_local(self, time_ns: int) -> int:
        """Convert a reading of this host's monotonic clock to one of pytest's host (nanoseconds)."""
        return time_ns

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """Prepare for a group whose ranks share these variables, among others, and preloaded modules."""

    def meet(
        self, group: str, plan: ProcessPlan, hosts: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, dict[str, dict[str, str]]]:
        """Return the ``init_method`` of the ranks' process group, and variables about it by host.

        Called for the host of rank 0; ``hosts`` are all of the plan, ``environment`` is what ranks inherit.
        """

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """Start a rank of a prepared group in exactly this environment, perhaps in another interpreter.

        ``boot`` is its first message, to which the host adds what differs between hosts. The lease whose
        ``descriptors`` it gets lasts until no process of the group is left.
        """

    def exit_code(self, group: str, pid: int) -> int | None:
        """Wait for the exit code of a rank, negative for a signal; ``None`` if it goes on running."""

    def write_stacks(self, group: str) -> None:
        """Let ranks print the stacks of their threads."""

    def kill(self, group: str) -> None:
        """Kill a group and all its descendants."""
