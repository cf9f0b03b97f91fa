# SPDX-License-Identifier: Apache-2.0
"""Dry runs: the stand-in for the driver's library in the place of a board, so that answers are known."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.nvml_sim import Board, World, build_library
from tests.nvml_sim.world import WORLD_VARIABLE

MS = 1_000_000

IDLE_W, BUSY_W = 100.0, 500.0

#: How long a pretended decoding step takes (seconds).
STEP_S = 0.005

#: The end of the work is waited for by looking at the clock, for so long.
SPIN_NS = 2 * MS

#: A sensor that looks all the time, whose counter comes up to 1 ms late.
FULL = Board(
    power_w=IDLE_W,
    latch_ns=100 * MS,
    latch_phase_ns=37 * MS,
    latch_jitter_ns=MS,
    power_latch_ns=100 * MS,
    power_window_ns=100 * MS,
)


@contextmanager
def board(directory: Path, made: Board = FULL) -> Iterator[str]:
    """A world with one board, seen by this process and by those that it starts; yields the board's UUID."""
    library = build_library(directory / "library")
    with World(directory / "world", [made]) as world:
        ctypes.CDLL(str(library))
        before = dict(os.environ)
        os.environ.update(world.environment(library.parent))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        # What was found out about this board is true of no other.
        os.environ["LLENERGY_CACHE_DIR"] = str(directory / "cache")
        try:
            yield world.board(0).uuid
        finally:
            os.environ.clear()
            os.environ.update(before)


def _world() -> World:
    return World.open(os.environ[WORLD_VARIABLE])


def _busy(world: World, seconds: float) -> tuple[int, int]:
    """Busy power for exactly so long, told in advance: a late end of the sleep adds nothing to it."""
    start_ns = world.set_power(0, BUSY_W)
    end_ns = world.set_power(0, IDLE_W, start_ns + round(seconds * 1e9))
    time.sleep(max(0.0, (end_ns - SPIN_NS - time.monotonic_ns()) / 1e9))
    # Sleeps end late, and idle power would then be part of the work.
    while time.monotonic_ns() < end_ns:
        pass
    return start_ns, end_ns


class StandInLoad:
    """Busy power of the stand-in."""

    what = f"{BUSY_W:.0f} W of the stand-in, {IDLE_W:.0f} W between"

    def __init__(self) -> None:
        self._world = _world()

    def on(self, seconds: float) -> tuple[int, int]:
        """Exactly so long."""
        return _busy(self._world, seconds)


class StandInSteps:
    """Steps that draw busy power and take ``STEP_S`` each."""

    what = f"steps of {STEP_S * 1e3:.0f} ms at {BUSY_W:.0f} W of the stand-in"
    tokens_per_step = 1

    def __init__(self) -> None:
        self._world = _world()

    def run(self, steps: int) -> None:
        """So many at a stretch."""
        _busy(self._world, steps * STEP_S)
