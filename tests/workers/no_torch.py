# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch, for tests that do not need it: torch takes a second to import."""

from __future__ import annotations

from pathlib import Path

TORCH = """
__version__ = "0"
def set_num_threads(n): pass
def get_num_threads(): return 1
def manual_seed(seed): pass
class cuda:
    device_count = staticmethod(lambda: 0)
    is_initialized = staticmethod(lambda: False)
"""

DISTRIBUTED = """
import os

def init_process_group(*args, **kwargs): pass
def barrier(): pass
def get_world_size(): return int(os.environ["WORLD_SIZE"])
def is_available(): return False
"""


def without_torch(directory: Path) -> None:
    """Write a package named torch that programs in this directory import instead."""
    package = directory / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH)
    (package / "distributed.py").write_text(DISTRIBUTED)
