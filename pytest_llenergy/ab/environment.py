# SPDX-License-Identifier: Apache-2.0
"""A virtual environment of a side's own, made by the command that the user gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from pytest_llenergy.ab.repository import without_git
from pytest_llenergy.errors import PlanError

#: Lines of a log that are shown where something failed.
TAIL = 10


def inherited() -> dict[str, str]:
    """The environment that sessions have of ours."""
    # An xdist worker of ours is none of theirs.
    return {
        name: value
        for name, value in without_git(os.environ).items()
        if not name.startswith("PYTEST_XDIST_W")
    }


def activated(venv: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """As ``source venv/bin/activate`` leaves it."""
    changed = dict(environment)
    changed.pop("PYTHONHOME", None)
    changed["VIRTUAL_ENV"] = str(venv)
    changed["PATH"] = os.pathsep.join([str(venv / "bin"), changed.get("PATH", os.defpath)])
    return changed


def python_of(venv: Path) -> Path:
    """Its interpreter."""
    return venv / "bin" / "python"


def set_up(venv: Path, checkout: Path, command: str, made_of: str, log: Path, name: str) -> None:
    """Make the environment and run the command in the checkout; nothing where both are done already.

    ``made_of`` names everything that it is made of. Raises ``PlanError`` with the last line of the log.
    """
    ready = venv.with_name(f"{venv.name}.ready")
    if ready.is_file() and ready.read_text() == made_of and python_of(venv).exists():
        return
    ready.unlink(missing_ok=True)
    shutil.rmtree(venv, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = activated(venv, inherited())
    with log.open("wb") as file:
        for words, shell in (([sys.executable, "-m", "venv", str(venv)], False), (command, True)):
            done = subprocess.run(
                words,
                shell=shell,
                cwd=checkout,
                env=environment if shell else inherited(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode != 0:
                what = f"--setup {command!r}" if shell else "python -m venv"
                raise PlanError(
                    f"{name}: {what} failed with exit code {done.returncode}: {last_line(log)!r}; the whole "
                    f"log: {log}"
                )
    ready.write_text(made_of)


def tail(log: Path, count: int = TAIL) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with log.open(errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), count))
    except OSError:
        return []


def last_line(log: Path) -> str:
    """The line of a log that is most likely to say what went wrong."""
    lines = tail(log, 40)
    errors = [line for line in lines if line.startswith(("ERROR", "E  ", "error:"))]
    return (errors or lines or ["no output"])[-1].strip()[:300]
