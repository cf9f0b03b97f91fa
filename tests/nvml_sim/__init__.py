# SPDX-License-Identifier: Apache-2.0
"""A C stand-in for libnvidia-ml.so.1 with an exactly known power waveform, for tests without hardware."""

from .boards import Board, Burst, MigInstance, Process
from .build import BuildError, build_library
from .world import World

__all__ = ["Board", "BuildError", "Burst", "MigInstance", "Process", "World", "build_library"]
