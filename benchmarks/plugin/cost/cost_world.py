# SPDX-License-Identifier: Apache-2.0
"""The simulated boards, and the library path by which this process finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.nvml_sim import Board, World
from tests.nvml_sim.world import WORLD_VARIABLE

MS = 1_000_000


@contextmanager
def boards(number: int, directory: Path) -> Iterator[list[str]]:
    """Simulate ``number`` boards whose counters tick every 100 ms, all out of phase; yields their UUIDs.

    The library is found by name through ``LD_LIBRARY_PATH``.
    """
    with World(directory / f"world-{os.getpid()}", [Board(power_w=100.0) for _ in range(number)]) as world:
        for index in range(number):
            world.update(index, latch_phase_ns=index * 100 * MS // number, latch_jitter_ns=MS)
        os.environ[WORLD_VARIABLE] = str(world.path)
        yield [world.board(index).uuid for index in range(number)]
