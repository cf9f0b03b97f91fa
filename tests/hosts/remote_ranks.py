# SPDX-License-Identifier: Apache-2.0
"""Two hosts with real agents that start ranks; one has its own name and a clock 5,000 s ahead (root)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import HostDevices, ProcessPlan, plan_on_hosts

from ..nvml_sim import Board, World
from ..ranks.groups import PLAIN
from ..ranks.survivors import marked
from .agents import AgentGang, can_be_another_host

#: Large enough that no socket buffers it.
LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Gang:
    """Two hosts as a test uses them."""

    clients: list[RemoteHost]
    hosts: dict[str, RemoteHost]
    locks: list[Path]

    def start(self, capabilities: Any = PLAIN) -> RankGroup:
        """Start two ranks on each host."""
        return RankGroup(plan(capabilities), self.hosts)


def plan(capabilities: Any = PLAIN, names: Sequence[str] = ("n1", "n2")) -> ProcessPlan:
    """Plan two ranks on each host."""
    holds = [HostDevices(name, Lease(devices=("cpu", "cpu")), [0, 1]) for name in names]
    return plan_on_hosts(capabilities, None, holds, 1)


@contextmanager
def open_gang(
    directory: Path,
    method: Any = "spawn",
    prefix: Sequence[str] = (),
    library: Path | None = None,
) -> Iterator[Gang]:
    """Start an agent on this host, n1, and one on n2, whose programs ``prefix`` runs.

    With the ``library`` of the stand-in for NVML, each has a board.
    """
    with ExitStack() as end:
        named, locks = {}, []
        for slot in range(2):
            locks.append(directory / f"locks{slot}")
            locks[slot].mkdir(mode=0o700)
            environment = {"LLENERGY_LOCK_DIR": str(locks[slot])}
            if library is not None:
                board = Board(uuid=f"GPU-{slot}")
                world = end.enter_context(World(directory / f"world{slot}", [board]))
                environment |= world.environment(library.parent)
            own_host = {"host": "n2", "prefix": prefix} if slot and can_be_another_host() else {}
            named[f"n{slot + 1}"] = {"environment": environment, **own_host}
        opened = end.enter_context(closing(AgentGang(named)))
        for each in opened.hosts:
            each.start_method = method
        yield Gang(list(opened.hosts), {each.name: each for each in opened.hosts}, locks)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two hosts for all tests that do not harm them."""
    with open_gang(tmp_path_factory.mktemp("gang")) as opened:
        yield opened


@pytest.fixture
def ranks(gang: Gang) -> Iterator[RankGroup]:
    """Two ranks on each host, without torch."""
    group = gang.start()
    yield group
    group.close()


@pytest.fixture
def own_gang(tmp_path: Path) -> Iterator[tuple[Gang, str]]:
    """Two hosts for a test that harms them, and the mark of all their processes."""
    with marked() as mark, open_gang(tmp_path) as opened:
        yield opened, mark
