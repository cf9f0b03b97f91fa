# SPDX-License-Identifier: Apache-2.0
"""How ranks start: ``spawn``, fresh interpreters, or ``forkserver``, forks of a process with torch loaded.

With ``forkserver`` the supervisor of the ranks imports what they share and then forks them. The standard
library's fork server ignores failed imports and serves forks with running threads or an initialised CUDA
driver, which fail later at random; here each of these is an error. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

StartMethod = Literal["spawn", "forkserver"]

#: What ``cuDeviceGetCount`` returns before ``cuInit`` (CUresult, cuda.h).
CUDA_ERROR_NOT_INITIALIZED = 3

REMEDY = "use --energy-start-method=spawn"


class PreloadError(Exception):
    """Ranks cannot be forked from this process. Arguments: the message, and a traceback if there is one."""


def preload(names: Sequence[str], sys_path: Sequence[str]) -> None:
    """Import modules for all later forks.

    Raises:
        PreloadError: If an import fails, or initialises CUDA.
    """
    sys.path[:] = sys_path
    for name in names:
        try:
            import_module(name)
        except BaseException as error:
            message = f"importing {name} before the ranks are forked failed: {type(error).__name__}: {error}"
            raise PreloadError(message, traceback.format_exc()) from error
    if _is_cuda_initialised():
        raise PreloadError(
            f"importing {', '.join(names)} initialised CUDA, which a forked rank cannot use; {REMEDY}"
        )
    # Memory pages that no garbage collection writes to stay shared by all forks.
    gc.collect()
    gc.freeze()


def check_threads() -> None:
    """Raise ``PreloadError`` if other threads run: a fork loses them, and their locks stay locked.

    To be called right after a fork, as CPython does for its own warning: libraries that handle forks have
    ended their threads by then.
    """
    threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1
    if threads > 1:
        raise PreloadError(f"the preloaded modules have left {threads - 1} threads running; {REMEDY}")


def _is_cuda_initialised() -> bool:
    """Return whether this process has called ``cuInit``. Does not load the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)
