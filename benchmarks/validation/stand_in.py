# SPDX-License-Identifier: Apache-2.0
"""Dry runs: a stand-in for the driver's library simulates a board whose energy is known exactly."""

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

#: Duration of a simulated decoding step (seconds).
STEP_S = 0.005

#: The end of the work is awaited by polling the clock for this long (seconds).
SPIN_NS = 2 * MS

#: A sensor that samples all the time, with a counter that ticks up to 1 ms late.
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
    """Simulate one board for this process and its children; yields the board's UUID."""
    library = build_library(directory / "library")
    with World(directory / "world", [made]) as world:
        ctypes.CDLL(str(library))
        before = dict(os.environ)
        os.environ.update(world.environment(library.parent))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        # Cached properties of the simulated board must not be used for a real one.
        os.environ["LLENERGY_CACHE_DIR"] = str(directory / "cache")
        try:
            yield world.board(0).uuid
        finally:
            os.environ.clear()
            os.environ.update(before)


def _world() -> World:
    return World.open(os.environ[WORLD_VARIABLE])


def _busy(world: World, seconds: float) -> tuple[int, int]:
    """Draw busy power for exactly ``seconds``.

    The end is scheduled in advance, so that a late wake-up does not prolong it.
    """
    start_ns = world.set_power(0, BUSY_W)
    end_ns = world.set_power(0, IDLE_W, start_ns + round(seconds * 1e9))
    time.sleep(max(0.0, (end_ns - SPIN_NS - time.monotonic_ns()) / 1e9))
    # Sleeps end late, and idle power would then count as work.
    while time.monotonic_ns() < end_ns:
        pass
    return start_ns, end_ns


class StandInLoad:
    """A load at the busy power of the stand-in."""

    what = f"{BUSY_W:.0f} W of the stand-in, {IDLE_W:.0f} W between"

    def __init__(self) -> None:
        self._world = _world()

    def on(self, seconds: float) -> tuple[int, int]:
        """Draw busy power for exactly ``seconds``."""
        return _busy(self._world, seconds)


class StandInSteps:
    """Steps that draw busy power and take ``STEP_S`` each."""

    what = f"steps of {STEP_S * 1e3:.0f} ms at {BUSY_W:.0f} W of the stand-in"
    tokens_per_step = 1

    def __init__(self) -> None:
        self._world = _world()

    def run(self, steps: int) -> None:
        """Run ``steps`` steps without a pause."""
        _busy(self._world, steps * STEP_S)
