# SPDX-License-Identifier: Apache-2.0
"""A git repository with energy tests: real commits and real pytest sessions, but known joules."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest_llenergy
from pytest_llenergy.cli import main
from pytest_llenergy.record.report import PairedReport
from pytest_llenergy.report.store import read_paired_report

CONFTEST = """
from tests.ab import known_joules
import work

known_joules.install(work)
"""

WORK = """
joules = 10.0
EACH = 10.0

def work():
    use(EACH)

def use(amount):
    global joules
    joules = amount
"""

TESTS = """
from work import use, work

def test_a(energy):
    energy(work)
"""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


class Project:
    """A repository in a separate directory.

    Args:
        directory: Where to make it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "project"
        (directory / "locks").mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            # Sessions load no plugin but ours, which makes them start faster.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p pytest_llenergy.plugin -p no:cacheprovider",
            "PYTHONPATH": str(Path(pytest_llenergy.__file__).parents[1]),
            "COLUMNS": "120",
            "LLENERGY_CACHE_DIR": str(directory / "cache"),
            "LLENERGY_LOCK_DIR": str(directory / "locks"),
        }
        self.path.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("conftest.py", CONFTEST)
        self.write("work.py", WORK)
        self.write("test_some.py", TESTS)
        self.write("pytest.ini", "[pytest]\n")
        self.commit()

    def git(self, *args: str) -> str:
        names = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *names, *args], cwd=self.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def edit(self, name: str, before: str, after: str) -> None:
        text = (self.path / name).read_text()
        assert before in text
        self.write(name, text.replace(before, after))

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "more")
        return self.git("rev-parse", "HEAD")

    def extend_path(self, *directories: Path) -> None:
        """Add directories to the ``PYTHONPATH`` of all sessions."""
        parts = [self.environment["PYTHONPATH"], *map(str, directories)]
        self.environment["PYTHONPATH"] = os.pathsep.join(parts)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start ``llenergy ab`` as a process, for tests that stop it."""
        return subprocess.Popen(
            [sys.executable, "-m", "pytest_llenergy.cli", "ab", *args],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ab(self, *args: str) -> Result:
        """Run ``llenergy ab`` in this process, which saves starting one; its sessions are processes."""
        out, err = StringIO(), StringIO()
        before = Path.cwd()
        os.chdir(self.path)
        try:
            with (
                mock.patch.dict(os.environ, self.environment, clear=True),
                redirect_stdout(out),
                redirect_stderr(err),
            ):
                status = main(["ab", *args])
        finally:
            os.chdir(before)
        return Result(status, out.getvalue(), err.getvalue())

    def paired(self) -> PairedReport:
        return read_paired_report(self.path / ".llenergy" / "ab" / "ab.json")

    def error(self, *args: str) -> str:
        """Run a command that must fail with a usage error, and return its last line."""
        result = self.ab(*args)
        assert (result.status, result.out) == (2, "")
        last = result.lines[-1]
        assert last.startswith("llenergy ab: ")
        return last.removeprefix("llenergy ab: ")

    def session_logs(self) -> list[str]:
        return sorted(path.name for path in (self.path / ".llenergy").rglob("*.log"))
