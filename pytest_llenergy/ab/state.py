# SPDX-License-Identifier: Apache-2.0
"""The state of an unfinished comparison on disk, so that the same command resumes it.

Each attempt at a session has a directory. A session counts as finished only if it ended regularly and its
report is complete, so that a comparison can be resumed after ``kill -9``.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_llenergy.ab.repository import Repository
from pytest_llenergy.ab.session import SessionFiles, Summary, Turn
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.record.base import cache_directory
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.report import Report, SideName
from pytest_llenergy.report.store import check_creatable, find_journals, read_report

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: The directory of what need not be kept, which git ignores, and the lock of each comparison in it.
DIRECTORY, LOCK = "ab", "lock"

SIDES: tuple[SideName, SideName] = ("base", "head")

#: Exit codes of pytest after which every test has run; of a usage error, such as a path that does not exist;
#: and of a run without tests.
FINISHED_EXIT_CODES, NO_SUCH_PATH, NOTHING_COLLECTED = (0, 1), 4, 5


class State:
    """The locked directory of one comparison. Its worktrees and environments are in ``checkouts``."""

    def __init__(self, root: Path, inputs: object, *, fresh: bool = False) -> None:
        """Lock the directory; with ``fresh``, discard what was measured.

        ``inputs`` identifies the comparison. Only its hash is stored, as a command may name credentials.
        """
        key = hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()[:12]
        self.directory: Path = root / ".llenergy" / DIRECTORY / key
        # Outside the user's checkout, where pytest would find its settings for a commit that has none.
        self.checkouts: Path = cache_directory() / DIRECTORY / f"{_prefix(root)}{key}"
        self._part = ""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            check_creatable(self.directory / "check")
        except OSError as error:
            raise PlanError(f"{self.directory}: cannot write there ({error.strerror})") from None
        self._lock: BaseFileLock = _lock(self.directory)
        replace_file(self.directory.parent / ".gitignore", b"*\n")
        if fresh:
            for directory in self.directory.glob("sessions*"):
                shutil.rmtree(directory)

    def part(self, number: int) -> State:
        """Return the state of one of several comparisons with the same sides, which share all else."""
        other = copy(self)
        other._part = f"-{number:03d}"
        return other

    def attempts(self, turn: Turn) -> list[SessionFiles]:
        """Return the attempts at a session so far."""
        return [SessionFiles(each) for each in sorted(self._sessions.glob(f"{_name(turn)}.*"), key=_attempt)]

    def next_attempt(self, turn: Turn) -> SessionFiles:
        """Make the directory of another attempt."""
        directory = self._sessions / f"{_name(turn)}.{len(self.attempts(turn)) + 1}"
        directory.mkdir(parents=True)
        return SessionFiles(directory)

    def load_duration(self, turn: Turn) -> float | None:
        """Return the duration of a finished session (seconds), or ``None`` if it is not finished."""
        attempts = self.attempts(turn)
        return float(attempts[-1].end.read_text()) if attempts and attempts[-1].end.exists() else None

    def load_reports(self, turn: Turn) -> list[Report]:
        """Return the reports of all attempts at a session, finished or not."""
        return [report for files in self.attempts(turn) if (report := _load_report(files)) is not None]

    def discard(self, turn: Turn) -> None:
        """Delete the measurements of a session."""
        for files in self.attempts(turn):
            shutil.rmtree(files.directory)

    def finish(self, repository: Repository | None, *, keep: bool) -> None:
        """Delete checkouts and measurements or, with ``keep``, rename sessions: they are not resumed."""
        for directory in self.directory.glob("sessions*") if keep else ():
            kept = self.directory / directory.name.replace("sessions", "kept")
            shutil.rmtree(kept, ignore_errors=True)
            directory.rename(kept)
        self.release()
        if not keep:
            remove_checkouts(self.checkouts, repository)
            shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def _sessions(self) -> Path:
        return self.directory / f"sessions{self._part}"


def explain_unfinished(files: SessionFiles, exit_status: int) -> str | None:
    """Return why an attempt did not run all tests and write a complete report, or ``None`` if it did."""
    if exit_status < 0:
        return f"was killed by signal {-exit_status}"
    if exit_status == NOTHING_COLLECTED and _attempt(files.directory) > 1:
        # Earlier attempts have measured all.
        return None
    if exit_status not in FINISHED_EXIT_CODES:
        return f"ended with exit code {exit_status}"
    summary, report = _load_summary(files), _load_report(files)
    if summary is not None and not summary.stopped:
        complete = report.run.complete if report is not None else not summary.measured
        if complete:
            return None
    return f"ended with exit code {exit_status} before all tests had run"


def lacks_tests(files: SessionFiles, exit_status: int, paths: list[Path]) -> bool:
    """Return whether an attempt ran as it should, but there is no energy test.

    ``paths`` are what may be paths among the arguments of pytest.
    """
    if exit_status == NO_SUCH_PATH:
        # Pytest names one missing path, but others may exist.
        return "file or directory not found: " in files.log.read_text(errors="replace") and not any(
            path.exists() for path in paths
        )
    summary = _load_summary(files)
    ran = exit_status in (0, NOTHING_COLLECTED) and not files.report.exists()
    return ran and summary is not None and not (summary.failed or summary.measured or summary.stopped)


def remove_checkouts(directory: Path, repository: Repository | None) -> None:
    """Remove both worktrees of a comparison, and its environments."""
    for side in SIDES:
        if repository is not None:
            repository.remove_worktree(directory / side)
    shutil.rmtree(directory, ignore_errors=True)


def clean(root: Path, repository: Repository | None) -> list[str]:
    """Remove what stopped or kept comparisons of a project have left, unless a process runs them.

    Returns:
        One line for each directory, or a line that nothing was found.
    """
    states = (root / ".llenergy" / DIRECTORY).glob("*")
    found = {path.name: path for path in states if (path / LOCK).exists()}
    checkouts = {
        path.name.removeprefix(_prefix(root)): path
        for path in (cache_directory() / DIRECTORY).glob(f"{_prefix(root)}*")
    }
    lines = []
    for key in sorted({*found, *checkouts}):
        directories = list(filter(None, (found.get(key), checkouts.get(key))))
        try:
            lock = _lock(directories[0])
        except PlanError:
            lines += [f"kept {directory}: in use" for directory in directories]
            continue
        for directory in directories:
            remove_checkouts(directory, repository)
            lines.append(f"removed {directory}")
        lock.release()
    return lines or ["nothing to remove"]


def _lock(directory: Path) -> BaseFileLock:
    from filelock import FileLock, Timeout

    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise PlanError(
            "another process is running this comparison; wait for it or stop it, its measurements are kept"
        ) from None
    return lock


def _prefix(root: Path) -> str:
    """Return how the names of all directories of checkouts of a project begin."""
    return f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-"


def _name(turn: Turn) -> str:
    return f"{turn.number:03d}-{turn.side}"


def _attempt(directory: Path) -> int:
    return int(directory.name.rpartition(".")[2])


def _load_summary(files: SessionFiles) -> Summary | None:
    try:
        return msgspec.json.decode(read_limited(files.summary), type=Summary)
    except FileNotFoundError:
        return None


def _load_report(files: SessionFiles) -> Report | None:
    """Return the report of an attempt, or one made from its journal; ``None`` if it measured nothing."""
    if files.report.exists():
        try:
            return read_report(files.report)
        except ReportError as error:
            raise PlanError(
                f"{error}; llenergy ab --fresh discards the measurements of this comparison and starts again"
            ) from None
    for journal in find_journals(files.report):
        with suppress(ReportError):
            return read_report(journal)
    return None
