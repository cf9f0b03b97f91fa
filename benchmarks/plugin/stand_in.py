# SPDX-License-Identifier: Apache-2.0
"""Processes that see simulated boards (``tests/nvml_sim``) instead of real ones, and how busy the host is."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.nvml_sim import World
from tests.nvml_sim.world import WORLD_VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def make_environment(scratch: Path, library: Path) -> dict[str, str]:
    """Return the environment of a worker: the stand-in as NVML, no user settings, no other GPU.

    Its modules are those of this repository, its cache and its locks are in ``scratch``.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": str(library.parent),
        "PATH": f"{scratch / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(scratch),
        "LLENERGY_CACHE_DIR": str(scratch / "cache"),
        "LLENERGY_LOCK_DIR": str(scratch / "locks"),
    }


def use_world(world: World, library: Path) -> None:
    """Make this world the NVML of this process and its children."""
    ctypes.CDLL(str(library))
    os.environ[WORLD_VARIABLE] = str(world.path)


def other_cores(before: tuple[float, float], wall_s: float) -> float:
    """Return the cores used by other processes since ``before``, a value of ``cpu_seconds()``."""
    busy_s, own_s = cpu_seconds()
    return max(0.0, (busy_s - before[0]) - (own_s - before[1])) / wall_s


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the host, including stolen ones, and of this run."""
    import psutil

    times, own = psutil.cpu_times(), os.times()
    busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return busy_s, sum(own[:4])
