# SPDX-License-Identifier: Apache-2.0
"""Run pytest and the plugin's programs as a user would, and keep their output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.store import read_report

from .machine import ROOT
from .part import Notebook, python_path
from .suite.in_rank import DRY_VARIABLE, OUT_VARIABLE

SUITE = Path(__file__).with_name("suite")

#: The ``llenergy`` command, wherever the package is.
LLENERGY = (sys.executable, "-m", "pytest_llenergy.cli")


@dataclass(frozen=True)
class FinishedCommand:
    """A finished command; ``code`` is None if its time was up."""

    code: int | None
    output: str
    seconds: float

    @property
    def last(self) -> str:
        """Return the last line of the output."""
        lines = [line.strip("= ") for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


def pytest_command(suite: str, *options: str) -> list[str]:
    """Return the command that runs one of the suites."""
    return [
        *(sys.executable, "-m", "pytest", "-c", str(SUITE / "pytest.ini"), "-ra"),
        *("-p", "benchmarks.validation.suite_plugin", *options, str(SUITE / f"{suite}.py")),
    ]


def make_environment(notebook: Notebook, more: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a command; None removes a variable."""
    given = {
        **os.environ,
        "PYTHONPATH": python_path(),
        DRY_VARIABLE: "1" if notebook.dry else "0",
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def run_command(
    notebook: Notebook,
    name: str,
    command: Sequence[str],
    limit_s: float,
    more: Mapping[str, str | None] | None = None,
    directory: Path = ROOT,
) -> FinishedCommand:
    """Run a command to its end or until its time is up; its output is kept under ``name``."""
    begin_s = time.monotonic()
    code: int | None
    try:
        done = subprocess.run(
            command,
            env=make_environment(notebook, more or {}),
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(limit_s, 1.0),
            check=False,
        )
        code, raw = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, raw = None, error.stdout or b""
    found = FinishedCommand(code, raw.decode(errors="replace"), time.monotonic() - begin_s)
    ended = f"exit code {code}" if code is not None else "its time was up"
    shown = [part if part != sys.executable else "python" for part in command]
    with notebook.file("terminal.txt").open("a") as log:
        log.write(f"$ {shlex.join(shown)}\n{found.output}\n[{name}: {ended}, {found.seconds:.1f} s]\n\n")
    return found


def read_notes(file: Path) -> list[dict[str, Any]]:
    """Return the observations that a suite recorded, in order."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def note_variables(file: Path) -> dict[str, str | None]:
    """Return the variables that tell a suite where to record its observations."""
    file.unlink(missing_ok=True)
    return {OUT_VARIABLE: str(file)}


def load_report(file: Path) -> Report | None:
    """Return a report, or the journal of a run that ended before it was written; None if there is neither."""
    journals = sorted(file.parent.glob(f"{file.stem}.*.journal.jsonl"))
    for one in (file, *journals):
        with suppress(OSError, LLEnergyError):
            return read_report(one)
    return None
