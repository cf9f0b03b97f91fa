# SPDX-License-Identifier: Apache-2.0
"""The simulated boards, whose energy is known exactly, and the work that they do."""

from __future__ import annotations

import time
from pathlib import Path

from tests.nvml_sim import Board, World

MS = 1_000_000

IDLE_W = 100.0
BUSY_W = 500.0

#: Durations of the work (seconds).
DURATIONS_S = (0.01, 0.03, 0.1, 0.25, 1.0)

PREFILL_W, DECODE_W = 600.0, 250.0

#: Loops of windows: name, seconds and watts of each window of a turn, and the rest after them (seconds).
LOOPS: dict[str, tuple[tuple[tuple[str, float, float], ...], float]] = {
    **{
        f"{length} ms, rests of {rest} ms": ((("step", length / 1e3, BUSY_W),), rest / 1e3)
        for length, rest in (
            (50, 10),
            (50, 50),
            (50, 100),
            (100, 10),
            (100, 50),
            (100, 100),
            (300, 10),
            (300, 50),
        )
    },
    "prefill 40 ms + decode 160 ms": ((("prefill", 0.04, PREFILL_W), ("decode", 0.16, DECODE_W)), 0.0),
    "prefill 150 ms + decode 500 ms": ((("prefill", 0.15, PREFILL_W), ("decode", 0.5, DECODE_W)), 0.0),
}

#: Turns of a loop, and the largest random change of each length, as a share.
TURNS, VARIED = 20, 0.05

TICK_NS = 100 * MS
#: Largest delay of a tick: real boards were observed to vary by about a percent of the period.
JITTER_NS = 1 * MS

FULL, PART = "full", "part-time"
SENSORS = (FULL, PART)


def board(sensor: str) -> Board:
    """Return a board that ticks every 100 ms and samples all of that time or its last quarter.

    The second has the name of a product known for this (Yang, Adamek, Armour, SC 2024). The power reading and
    the counter of a board share the sensor.
    """
    window_ns = TICK_NS if sensor == FULL else TICK_NS // 4
    return Board(
        name="NVIDIA Sim RTX 4090" if sensor == FULL else "NVIDIA H100 80GB HBM3",
        power_w=IDLE_W,
        latch_ns=TICK_NS,
        latch_phase_ns=37 * MS,
        latch_jitter_ns=JITTER_NS,
        sensor_window_ns=0 if sensor == FULL else window_ns,
        power_latch_ns=TICK_NS,
        power_window_ns=window_ns,
    )


def run_burst(world: World, seconds: float) -> None:
    """Draw busy power for ``seconds``."""
    world.set_power(0, BUSY_W)
    # The simulated board is busy while this sleeps.
    time.sleep(seconds)
    world.set_power(0, IDLE_W)


def run_part(world: World, seconds: float, watts: float) -> None:
    """Draw ``watts`` for ``seconds``, and leave them for the next part to change."""
    world.set_power(0, watts)
    # The simulated board is busy while this sleeps.
    time.sleep(seconds)


def provide_nvidia_smi(directory: Path) -> None:
    """Put an nvidia-smi on PATH: CodeCarbon requires one to see NVIDIA boards."""
    directory.mkdir(parents=True)
    program = directory / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
