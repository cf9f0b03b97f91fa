# SPDX-License-Identifier: Apache-2.0
"""A C stand-in for libnvidia-ml.so.1 with an exactly known power waveform, for tests without hardware."""

from .boards import Board, Fault, MigInstance, Process
from .build import BuildError, build_library
from .shapes import Burst, Decay, Noise, Ramp
from .world import World

__all__ = [
    "Board",
    "BuildError",
    "Burst",
    "Decay",
    "Fault",
    "MigInstance",
    "Noise",
    "Process",
    "Ramp",
    "World",
    "build_library",
]
