# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for the suites: models with random weights, a deadline, and a record of CUDA's state."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.transformers import SPEC

#: Monotonic time (seconds) by which all tests must be over, and the time that a test needs.
UNTIL_VARIABLE = "LLENERGY_VALIDATION_UNTIL"
TEST_S = 9.0

#: File in which pytest's own process records whether CUDA was initialised.
STATE_VARIABLE = "LLENERGY_VALIDATION_STATE"

#: Set if the models are directories without weights.
MODELS_VARIABLE = "LLENERGY_VALIDATION_MODELS"

#: ``CUDA_ERROR_NOT_INITIALIZED`` (cuda.h): returned by every call before ``cuInit``.
NOT_INITIALIZED = 3

RANDOM_WEIGHTS = replace(SPEC, factory="benchmarks.validation.random_weights:RandomWeightsBackend")


def pytest_llenergy_backends() -> Sequence[BackendSpec]:
    return [RANDOM_WEIGHTS] if MODELS_VARIABLE in os.environ else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get(UNTIL_VARIABLE)
    if until is not None and time.monotonic() + TEST_S > float(until):
        pytest.skip("out of time")


def pytest_sessionfinish() -> None:
    place = os.environ.get(STATE_VARIABLE)
    if place is not None:
        Path(place).write_text(json.dumps(cuda_state()))


def cuda_state() -> dict[str, Any]:
    """Return whether this process has called ``cuInit``: by the driver, by torch and by its open files."""
    torch = sys.modules.get("torch")
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            files.append(str(link.readlink()))
    return {
        "driver": _driver_code(),
        "torch": None if torch is None else torch.cuda.is_initialized(),
        "uvm": any(file.startswith("/dev/nvidia-uvm") for file in files),
    }


def _driver_code() -> int | None:
    """Return the driver's code for a call that needs no device; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())))
