# SPDX-License-Identifier: Apache-2.0
"""Run one part of the validation: command line, time limit, result file and failure handling."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_llenergy.record.base import Primitive

from . import machine
from .results import Check, Figure, Line, Part, Status, Table, encode


class SkippedError(Exception):
    """Raised when a part does not apply on this machine; the message gives the reason."""


class OutOfTimeError(BaseException):
    """Raised when the part's time is up.

    Derives from BaseException so that ``except Exception`` in the work does not catch it.
    """


@dataclass
class Notebook:
    """Collects the results of a running part.

    They are written to its file after every addition, so that little is lost if the part is killed.
    """

    name: str
    out: Path
    budget_s: float
    dry: bool
    begin_s: float = field(default_factory=time.monotonic)
    findings: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Return the seconds until the part must end."""
        return self.begin_s + self.budget_s - time.monotonic()

    def file(self, name: str) -> Path:
        """Return the path of a file that the part may write; it is packed into the archive of details."""
        directory = self.out / self.name
        directory.mkdir(parents=True, exist_ok=True)
        return directory / name

    def find(self, text: str) -> None:
        """Add a sentence to the summary at the top of the part."""
        print(f"  {text}", flush=True)
        self.findings.append(text)
        self.save()

    def check(self, name: str, ok: bool | None, detail: str = "") -> None:
        """Record whether an expectation holds; None means that it could not be tested."""
        sign = {True: "ok", False: "FAILED", None: "not tried"}[ok]
        print(f"  {sign}: {name}{f' ({detail})' if detail else ''}", flush=True)
        self.checks.append(Check(name=name, ok=ok, detail=detail))
        self.save()

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Primitive]], note: str = ""
    ) -> None:
        """Add a table."""
        rounded = [[_rounded(cell) for cell in row] for row in rows]
        self.tables.append(Table(title=title, columns=list(columns), rows=rounded, note=note))
        self.save()

    def figure(self, title: str, x: str, y: str, lines: Sequence[Line], *, log_x: bool = False) -> None:
        """Add a plot."""
        self.figures.append(Figure(title=title, x_label=x, y_label=y, lines=list(lines), log_x=log_x))
        self.save()

    def save(self, status: Status = "stopped", reason: str | None = "it did not finish") -> Part:
        """Write the results so far; a part counts as stopped until it has finished."""
        part = Part(
            name=self.name,
            status=status,
            reason=reason,
            dry=self.dry,
            budget_s=self.budget_s,
            duration_s=round(time.monotonic() - self.begin_s, 2),
            findings=self.findings,
            checks=self.checks,
            tables=self.tables,
            figures=self.figures,
            data=self.data,
        )
        self.out.mkdir(parents=True, exist_ok=True)
        fresh = self.out / f".{self.name}.json"
        fresh.write_bytes(encode(part))
        fresh.replace(self.out / f"{self.name}.json")
        return part


def _rounded(cell: Primitive) -> Primitive:
    return float(f"{cell:.5g}") if isinstance(cell, float) else cell


Body = Callable[[Notebook], None]


def main(name: str, body: Body, budget_s: float, argv: Sequence[str] | None = None) -> int:
    """Run one part from the command line. Returns 1 if it failed or was stopped."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.validation.{name}")
    parser.add_argument("--out", type=Path, default=Path("validation"), metavar="DIR")
    parser.add_argument("--budget", type=float, default=budget_s, metavar="S", help=f"({budget_s:g})")
    parser.add_argument("--dry", action="store_true", help="try it out without a GPU; validates nothing")
    args = parser.parse_args(argv)
    return 0 if run(name, body, args.out, args.budget, args.dry).status in ("passed", "skipped") else 1


def run(name: str, body: Body, out: Path, budget_s: float, dry: bool) -> Part:
    """Run one part and record how it ended."""
    # An absolute path, because parts start processes in other working directories.
    notebook = Notebook(name, out.resolve(), budget_s, dry)
    status: Status = "passed"
    reason = None
    with _alarm(budget_s):
        try:
            body(notebook)
        except SkippedError as error:
            status, reason = "skipped", str(error)
        except OutOfTimeError:
            status, reason = "stopped", f"its {budget_s:.0f} s were used up"
        except Exception as error:
            # Recorded with its traceback so that the other parts still run.
            notebook.file("traceback.txt").write_text(traceback.format_exc())
            status, reason = "failed", f"{type(error).__name__}: {error}"
    broken = [check.name for check in notebook.checks if check.ok is False]
    if status == "passed" and broken:
        status, reason = "failed", f"checks failed: {'; '.join(broken)}"
    print(f"{name}: {status}{f' ({reason})' if reason else ''}", flush=True)
    return notebook.save(status, reason)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` in the body when its time is up or the runner sends SIGTERM."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def need_cuda() -> None:
    """Raise ``SkippedError`` if torch has no usable CUDA."""
    why = machine.cuda_missing()
    if why is not None:
        raise SkippedError(f"needs CUDA: {why}")


def need_board() -> str:
    """Return the UUID of the board to use, and make it the only one visible to this process and its children.

    Must be called before torch is imported.

    Raises:
        SkippedError: No board is available.
    """
    why = machine.nvml_missing()
    uuid, _ = machine.first_gpu()
    if why is not None or uuid is None:
        raise SkippedError(f"needs a GPU: {why}")
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    return uuid


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Yield a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix=f"llenergy-{prefix}-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def python_path() -> str:
    """Return the PYTHONPATH for child processes: this repository, then the inherited value."""
    args = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(machine.ROOT), args)))


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in a new process in the repository root."""
    return [sys.executable, "-m", f"benchmarks.validation.{module}", *arguments]
