# SPDX-License-Identifier: Apache-2.0
"""Importing what forked ranks share, strictly: nothing may fail, start threads or wake the GPU driver."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

#: What ``cuDeviceGetCount`` says before ``cuInit`` (CUresult, cuda.h).
CUDA_ERROR_NOT_INITIALIZED = 3

REMEDY = "use --energy-start-method=spawn"


class PreloadError(Exception):
    """Forked ranks cannot be had. ``details`` is the traceback, if there is one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def load(names: Sequence[str], sys_path: Sequence[str]) -> None:
    """Import these. Raises ``PreloadError``; the standard library's fork server would pass over it."""
    sys.path[:] = sys_path
    for name in names:
        try:
            import_module(name)
        except BaseException as error:
            said = f"importing {name} before the ranks are forked failed: {type(error).__name__}: {error}"
            raise PreloadError(said, traceback.format_exc()) from error
    if driver_is_awake():
        raise PreloadError(
            f"importing {', '.join(names)} initialised CUDA, which a forked rank cannot use; {REMEDY}"
        )
    # Pages that no collection writes to stay shared by all forks.
    gc.collect()
    gc.freeze()


def check_threads() -> None:
    """Right after a fork, when libraries that know of forks have ended their threads, as CPython looks too.

    Raises ``PreloadError`` when others are left: a fork loses them, and what they held stays locked.
    """
    threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1
    if threads > 1:
        raise PreloadError(f"the preloaded modules have left {threads - 1} threads running; {REMEDY}")


def driver_is_awake() -> bool:
    """Whether somebody has called ``cuInit`` in this process. Does not load the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)
