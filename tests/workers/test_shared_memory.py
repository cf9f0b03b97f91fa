# SPDX-License-Identifier: Apache-2.0
"""Shared memory with a name goes with the ranks that have made it, and that of others stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from pytest_llenergy.workers.local import LocalHost
from pytest_llenergy.workers.shared_memory import SHM, mapped, names

from .groups import PLAIN, run, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the directory is Linux's")


def leave_memory() -> tuple[str, str]:
    """Made here and by a child, which nothing that cleans up knows of."""
    import mmap
    import os
    import subprocess
    import sys

    code = (
        "import mmap, os, sys, time\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "os.ftruncate(file, 4096)\n"
        "kept = mmap.mmap(file, 4096)\n"
        "print('there', flush=True)\n"
        "time.sleep(300)\n"
    )
    own, other = (f"llenergy-test-{os.getpid()}-{number}" for number in (0, 1))
    child = subprocess.Popen([sys.executable, "-c", code, f"/dev/shm/{other}"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    file = os.open(f"/dev/shm/{own}", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4096)
    sys.modules["kept_for_the_test"] = mmap.mmap(file, 4096)  # type: ignore[assignment]
    return own, other


@pytest.fixture
def others() -> Iterator[shared_memory.SharedMemory]:
    """Memory of this process, which the ranks have nothing to do with."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


def test_what_ranks_have_made_goes_with_them_and_nothing_else(others: shared_memory.SharedMemory) -> None:
    host = LocalHost()
    left: tuple[str, ...] = ()
    try:
        ranks = start(host, 1, PLAIN)
        (left,) = run(ranks, leave_memory)
        assert names() >= {*left, others.name}
        ranks.kill()
        assert names().isdisjoint(left)
        assert others.name in names()
    finally:
        host.close()
        for name in left:
            with suppress(FileNotFoundError):
                (SHM / name).unlink()


def read(path: str) -> bytes:
    import mmap
    import os
    import sys

    file = os.open(path, os.O_RDWR)
    memory = mmap.mmap(file, 4096)
    sys.modules["kept_for_the_test"] = memory  # type: ignore[assignment]
    return memory[:5]


def test_what_was_there_before_stays_although_ranks_have_used_it(tmp_path: Path) -> None:
    """Nobody but the rank has it mapped: only that it is older tells."""
    path = SHM / f"llenergy-test-{tmp_path.name}"
    path.write_bytes(b"older" + bytes(4091))
    host = LocalHost()
    try:
        ranks = start(host, 1, PLAIN)
        assert run(ranks, read, str(path)) == [b"older"]
        assert path.name in mapped([ranks.ranks[0].pid])
        ranks.kill()
        assert path.read_bytes()[:5] == b"older"
    finally:
        host.close()
        path.unlink()
