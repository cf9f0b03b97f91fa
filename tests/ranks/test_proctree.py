# SPDX-License-Identifier: Apache-2.0
"""Named shared memory and semaphores end with the ranks that made them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.ranks.local import LocalHost

from .groups import PLAIN, run, start

SHM = Path("/dev/shm")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the directory is Linux's")


@pytest.fixture
def own_host() -> Iterator[LocalHost]:
    host = LocalHost("spawn")
    yield host
    host.close()


def make_memory_and_semaphore() -> tuple[str, str]:
    """Kept open; the names of their files."""
    import multiprocessing
    import sys
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=4096)
    # One of a child that is started anew keeps its name, one for forks does not.
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    sys.modules["kept_for_the_test"] = (memory, semaphore)  # type: ignore[assignment]
    return memory.name, f"sem.{semaphore._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]


def test_shared_memory_of_killed_ranks_is_removed(own_host: LocalHost) -> None:
    ranks = start(own_host, 1, PLAIN)
    (made,) = run(ranks, make_memory_and_semaphore)
    assert all((SHM / name).exists() for name in made)
    ranks.kill()
    assert not [name for name in made if (SHM / name).exists()]
