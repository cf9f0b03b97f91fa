# SPDX-License-Identifier: Apache-2.0
"""Projects of users, and simulated GPUs for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nvml_sim import Board, World, build_library

from .project import Project

#: Simulates boards for a project.
GiveBoards = Callable[[Project, Sequence[Board]], World]


@pytest.fixture(autouse=True)
def _private_locks() -> None:
    """Override what other tests need: here each project has its own locks, cache and modules."""


@pytest.fixture(autouse=True)
def _private_checks() -> None:
    """As above."""


@pytest.fixture(autouse=True)
def _modules_stay() -> None:
    """As above."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of the run share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def models_directory() -> Path:
    """Return where the user's runs keep converted models: to convert one takes half a minute."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    models = Path(os.environ.get("LLENERGY_CACHE_DIR") or Path(base) / "pytest-llenergy") / "models"
    models.mkdir(parents=True, exist_ok=True)
    return models.resolve()


@contextmanager
def open_project(directory: Path) -> Iterator[Project]:
    project = Project(directory, models_directory())
    try:
        yield project
    finally:
        project.close()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """An empty project."""
    with open_project(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def module_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """An empty project that the tests of a module share."""
    with open_project(tmp_path_factory.mktemp("module")) as opened:
        yield opened


@pytest.fixture(scope="session")
def give_boards(shared: Path) -> GiveBoards:
    """Return a function that gives a project simulated boards, through a stand-in for NVIDIA's library."""
    library = build_library(shared / "contract_nvml")

    def give(project: Project, boards: Sequence[Board]) -> World:
        world = World(project.path.parent / "world", boards)
        project.env |= world.environment(library.parent)
        return world

    return give
