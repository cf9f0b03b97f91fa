# SPDX-License-Identifier: Apache-2.0
"""A git repository with energy tests: real commits and real pytest sessions, but known joules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest import mock

import pytest

import pytest_llenergy
from pytest_llenergy.ab import session
from pytest_llenergy.cli import main
from pytest_llenergy.record.report import PairedReport
from pytest_llenergy.report.store import read_paired_report

#: Imported once, before sessions are forks.
USED_BY_SESSIONS = [
    *(f"pytest_llenergy.plugin.{name}" for name in ("collection", "controller", "gating", "report_builder")),
    *("pytest_llenergy.report.terminal", "rich.table", "rich._emoji_codes", "tests.ab.known_joules"),
    *("cloudpickle", "psutil"),
]

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


class ForkedSession:
    """``subprocess.Popen`` of a session in a fork of this process, which has imported pytest and the plugin.

    To start an interpreter and import them takes most of the time of a session.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: dict[str, str],
        stdout: IO[bytes],
        preexec_fn: Callable[[], None],
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(words, cwd, env, stdout, preexec_fn)

    def wait(self, timeout_s: float | None = None) -> int:
        end_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("pytest", timeout_s or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode

    def _run(
        self,
        words: Sequence[str],
        cwd: Path,
        env: dict[str, str],
        stdout: IO[bytes],
        preexec_fn: Callable[[], None],
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.chdir(cwd)
            preexec_fn()
            for number in (signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout.fileno(), 1), (1, 2)):
                os.dup2(source, target)
            sys.stdin = os.fdopen(0)
            sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1) for each in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            sys.argv = ["pytest", *words[3:]]
            sys.path[:0] = [str(cwd), *env["PYTHONPATH"].split(os.pathsep)]
            warnings.resetwarnings()
            code = pytest.main(sys.argv[1:])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def start_session(words: Sequence[str], cwd: Path, **options: Any) -> subprocess.Popen[bytes] | ForkedSession:
    """Fork if the session has this interpreter, without options, and its directory is there."""
    if [*words[:3]] != [sys.executable, "-m", "pytest"] or not cwd.is_dir():
        return subprocess.Popen(words, cwd=cwd, **options)
    for name in USED_BY_SESSIONS:
        import_module(name)
    return ForkedSession(words, cwd, *(options[name] for name in ("env", "stdout", "preexec_fn")))


class Project:
    """A repository in a separate directory.

    Args:
        directory: Where to make it.
        forks: Whether sessions are forks of this process; otherwise each is a new interpreter.
    """

    def __init__(self, directory: Path, *, forks: bool = True) -> None:
        self._start = start_session if forks else subprocess.Popen
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
        names = ("DEVNULL", "STDOUT", "TimeoutExpired")
        of_session = SimpleNamespace(Popen=self._start, **{name: getattr(subprocess, name) for name in names})
        out, err = StringIO(), StringIO()
        before = Path.cwd()
        os.chdir(self.path)
        try:
            with (
                mock.patch.dict(os.environ, self.environment, clear=True),
                mock.patch.object(session, "subprocess", of_session),
                redirect_stdout(out),
                redirect_stderr(err),
            ):
                status = main(["ab", *args])
        finally:
            os.chdir(before)
        return Result(status, out.getvalue(), err.getvalue())

    def paired(self) -> PairedReport:
        return read_paired_report(self.path / ".llenergy" / "ab.json")

    def error(self, *args: str) -> str:
        """Run a command that must fail with a usage error, and return its last line."""
        result = self.ab(*args)
        assert (result.status, result.out) == (2, "")
        last = result.lines[-1]
        assert last.startswith("llenergy ab: ")
        return last.removeprefix("llenergy ab: ")

    def session_logs(self) -> list[str]:
        return sorted(path.name for path in (self.path / ".llenergy").rglob("*.log"))
