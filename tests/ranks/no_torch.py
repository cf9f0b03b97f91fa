# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch, for tests that do not need it: torch takes a second to import.

Unlike a CPU build of torch, it sees the GPUs in ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

from pathlib import Path

TORCH = """
import os
from types import SimpleNamespace
__version__ = "0"
def visible(): return [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
def zeros(size, device): pass
def set_num_threads(n): pass
def get_num_threads(): return 1
def manual_seed(seed): pass
class cuda:
    device_count = staticmethod(lambda: len(visible()))
    is_initialized = staticmethod(lambda: False)
    set_device = staticmethod(lambda device: None)
    get_device_properties = staticmethod(lambda index: SimpleNamespace(uuid=visible()[index][len("GPU-"):]))
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
