# SPDX-License-Identifier: Apache-2.0
"""Simulated hosts for the steps of the doctor."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.fixtures import Give

Torch = Callable[[str], Path]
Boards = Callable[..., None]


@pytest.fixture
def replace_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Return a function that shadows torch in child processes with a module and returns its file."""

    def replace(text: str) -> Path:
        path = tmp_path / "stand_in" / "torch.py"
        path.parent.mkdir()
        path.write_text(text)
        # Child processes inherit the path; this process does not import torch.
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setenv("PYTHONPATH", f"{path.parent}:{os.environ.get('PYTHONPATH', '')}")
        return path

    return replace


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in for ``libcuda.so.1`` and return its directory."""
    compiler = shutil.which("cc")
    assert compiler is not None
    directory = tmp_path_factory.mktemp("cuda_sim")
    source, library = Path(__file__).with_name("cuda_sim.c"), directory / "libcuda.so.1"
    flags = ("-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return directory


@pytest.fixture
def simulate_boards(
    tmp_path: Path, nvml_children: Give, cuda_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Boards:
    """Return a function that sets the boards and the result of ``cuInit`` for child processes."""

    def simulate(*boards: Board, cuda_init: int = 0) -> None:
        nvml_children(World(tmp_path / "world", boards))
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{os.environ['LD_LIBRARY_PATH']}:{cuda_library}")
        monkeypatch.setenv("CUDA_SIM_INIT", str(cuda_init))

    return simulate
