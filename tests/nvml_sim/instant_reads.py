# SPDX-License-Identifier: Apache-2.0
"""Read what the C library would answer at any time, without waiting for it."""

from __future__ import annotations

import ctypes
from types import ModuleType


def counter_mj(nvml: ModuleType, index: int, at_ns: int, scope: int = 0) -> int:
    """Return the energy counter of a board at an instant of CLOCK_MONOTONIC, in mJ; initialise NVML first."""
    answer = ctypes.c_ulonglong()
    code = nvml.nvmlLib.nvml_sim_counter_mj(index, ctypes.c_int64(at_ns), scope, ctypes.byref(answer))
    if code != 0:
        raise RuntimeError(f"nvml_sim_counter_mj returned {code}")
    return answer.value


def power_mw(nvml: ModuleType, index: int, at_ns: int, *, averaged: bool = False, scope: int = 0) -> int:
    """Return field 185 if `averaged`, else field 186, at an instant, in mW."""
    answer = ctypes.c_uint()
    arguments = (index, ctypes.c_int64(at_ns), int(averaged), scope, ctypes.byref(answer))
    code = nvml.nvmlLib.nvml_sim_power_mw(*arguments)
    if code != 0:
        raise RuntimeError(f"nvml_sim_power_mw returned {code}")
    return answer.value
