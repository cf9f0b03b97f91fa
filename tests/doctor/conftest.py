# SPDX-License-Identifier: Apache-2.0
"""What a host can be like that the steps run on."""

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
def torch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Put a module of this text before the real torch, for processes that are started. Returns its file."""

    def give(text: str) -> Path:
        path = tmp_path / "stand_in" / "torch.py"
        path.parent.mkdir()
        path.write_text(text)
        # This process has no business with it.
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setenv("PYTHONPATH", f"{path.parent}:{os.environ.get('PYTHONPATH', '')}")
        return path

    return give


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stand-in for ``libcuda.so.1``."""
    compiler = shutil.which("cc")
    assert compiler is not None
    directory = tmp_path_factory.mktemp("cuda_sim")
    source, library = Path(__file__).with_name("cuda_sim.c"), directory / "libcuda.so.1"
    flags = ("-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return directory


@pytest.fixture
def boards_are(
    tmp_path: Path, nvml_children: Give, cuda_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Boards:
    """Give boards, and what ``cuInit`` returns, to processes that are started."""

    def give(*boards: Board, cuda_init: int = 0) -> None:
        nvml_children(World(tmp_path / "world", boards))
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{os.environ['LD_LIBRARY_PATH']}:{cuda_library}")
        monkeypatch.setenv("CUDA_SIM_INIT", str(cuda_init))

    return give
