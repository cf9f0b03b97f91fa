# SPDX-License-Identifier: Apache-2.0
"""Fixtures for conftest files: the built stand-in, and NVML in the process of the test."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from .build import build_library
from .world import World

__all__ = ["Give", "nvml_attach", "nvml_children", "nvml_library"]

Give = Callable[[World], World]
"""Type of ``nvml_children``."""


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in; pass the parent directory to `World.environment`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return build_library(root / "nvml_sim_library")


@pytest.fixture
def nvml_children(nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """Return a function that shows a world to child processes and returns it."""

    def give(world: World) -> World:
        for name, value in world.environment(nvml_library.parent).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return world

    return give


@pytest.fixture
def nvml_attach(
    nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[World], ModuleType]]:
    """Return a function that connects the real `pynvml` of this process to a world and returns the module.

    NVML is shut down after the test. The library stays loaded, as no library can be safely unloaded,
    so later in this process nvmlInit says "driver not loaded" where it might have said "not found".
    """
    pynvml: ModuleType = pytest.importorskip("pynvml")

    def drain() -> None:
        with suppress(pynvml.NVMLError):
            while True:
                pynvml.nvmlShutdown()

    def attach(world: World) -> ModuleType:
        drain()
        # dlopen by name finds an already loaded library with this SONAME.
        ctypes.CDLL(str(nvml_library))
        # The inventory is read by a process of its own.
        for name, value in world.environment(nvml_library.parent).items():
            monkeypatch.setenv(name, value)
        pynvml.nvmlInit()
        if not hasattr(pynvml.nvmlLib, "nvml_sim_version"):
            raise RuntimeError("another libnvidia-ml.so.1 was loaded first; use a subprocess instead")
        return pynvml

    yield attach
    drain()
