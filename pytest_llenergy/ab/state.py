# SPDX-License-Identifier: Apache-2.0
"""The state of an unfinished comparison on disk, so that the same command resumes it.

Each attempt at a session has separate files. A session counts as finished only if it ended regularly and its
report is complete, so that a comparison can be resumed after ``kill -9``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_llenergy.ab.repository import Repository
from pytest_llenergy.ab.schedule import Turn
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.record.base import MALFORMED, StoredStruct, cache_directory
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.report import Report, SideName
from pytest_llenergy.report.store import find_journals, read_report

if TYPE_CHECKING:
    from filelock import BaseFileLock

DIRECTORY = "ab"

#: Files of a comparison: its lock and the process that holds it; the mark of one that is never resumed.
LOCK, PID, FINISHED = "lock", "pid", "finished"

SIDES: tuple[SideName, SideName] = ("base", "head")

#: Exit codes of pytest after which every test has run.
FINISHED_EXIT_CODES = (0, 1)
#: That of a usage error, such as a path that does not exist, and of a run without tests.
NO_SUCH_PATH, NOTHING_COLLECTED = 4, 5

MISSING_PATH = re.compile(r"^ERROR: file or directory not found: ", re.MULTILINE)


class SessionSummary(StoredStruct, frozen=True):
    """What ``session_plugin`` writes at the end of a session.

    ``failed`` are node ids. ``measured`` is whether any test measured energy, and ``stopped`` whether the
    session ended before all tests had run.
    """

    failed: list[str]
    measured: bool
    stopped: bool


class State:
    """The locked directory of one comparison. Its worktrees and environments are in ``checkouts``."""

    def __init__(self, root: Path, inputs: object, *, fresh: bool = False) -> None:
        """Lock the directory; with ``fresh``, discard what was measured.

        ``inputs`` identifies the comparison. Only its hash is stored, as a command may name credentials.

        Raises:
            PlanError: If another process runs the same comparison.
        """
        key = hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()[:12]
        self.directory: Path = root / ".llenergy" / DIRECTORY / key
        # Outside the user's checkout, where pytest would find its settings for a commit that has none.
        self.checkouts: Path = cache_directory() / DIRECTORY / f"{_prefix(root)}{key}"
        self._part = ""
        make_directory(self.directory)
        self._lock: BaseFileLock = _lock(self.directory)
        replace_file(self.directory.parent / ".gitignore", b"*\n")
        finished = self.directory / FINISHED
        if fresh or finished.exists():
            for directory in self.directory.glob("sessions*"):
                shutil.rmtree(directory)
            finished.unlink(missing_ok=True)

    def part(self, number: int) -> State:
        """Return the state of one of several comparisons with the same sides, which share all else."""
        other = copy(self)
        other._part = f"-{number:03d}"
        return other

    def load_finished(self, turn: Turn) -> tuple[list[Report], float] | None:
        """Return the reports of all attempts at a finished session and its time (seconds), or ``None``."""
        attempts = self._attempts(turn)
        if not attempts or not attempts[-1].end.exists():
            return None
        return self.load_reports(turn), float(attempts[-1].end.read_text())

    def lacks_tests(self, turn: Turn, exit_status: int, paths: list[Path]) -> bool:
        """Return whether the last attempt ran as it should, but there is no energy test.

        ``paths`` are what may be paths among the arguments of pytest.
        """
        files = self._attempts(turn)[-1]
        if exit_status == NO_SUCH_PATH:
            # Pytest names one missing path, but others may exist.
            found = MISSING_PATH.findall(files.log.read_text(errors="replace"))
            return bool(found) and not any(path.exists() for path in paths)
        summary = _read_summary(files)
        ran = exit_status in (0, NOTHING_COLLECTED) and not files.report.exists()
        return ran and summary is not None and not (summary.failed or summary.measured or summary.stopped)

    def list_failed_tests(self, turn: Turn) -> set[str]:
        """Return the node ids of the tests that failed in a session, with or without a measurement."""
        summaries = [_read_summary(files) for files in self._attempts(turn)]
        return {name for each in summaries if each is not None for name in each.failed}

    def load_reports(self, turn: Turn) -> list[Report]:
        """Return the reports of all attempts at a session, finished or not."""
        return [report for files in self._attempts(turn) if (report := _read_report(files)) is not None]

    def list_import_directories(self, turn: Turn) -> list[Path]:
        """Return, for each attempt, the directory that lists its imports."""
        return [files.modules for files in self._attempts(turn)]

    def discard(self, turn: Turn) -> None:
        """Delete the measurements of a session."""
        for path in self._sessions().glob(f"{turn.number:03d}-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def next_attempt(self, turn: Turn) -> SessionFiles:
        """Return the files for another attempt."""
        return self._files(turn, len(self._attempts(turn)) + 1)

    @property
    def finished_sessions(self) -> int:
        """The number of finished sessions."""
        return len(list(self.directory.glob("sessions*/*.end")))

    def finish(self, *, keep: bool) -> None:
        """Delete the files of the comparison or, with ``keep``, mark it so that it is never resumed."""
        if keep:
            (self.directory / FINISHED).touch()
        self.release()
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _attempts(self, turn: Turn) -> list[SessionFiles]:
        count = len(list(self._sessions().glob(f"{turn.number:03d}-{turn.side}.*.log")))
        return [self._files(turn, each) for each in range(1, count + 1)]

    def _files(self, turn: Turn, attempt: int) -> SessionFiles:
        return SessionFiles(self._sessions(), f"{turn.number:03d}-{turn.side}.{attempt}")

    def _sessions(self) -> Path:
        directory = self.directory / f"sessions{self._part}"
        directory.mkdir(exist_ok=True)
        return directory


def make_directory(directory: Path) -> None:
    """Create a directory, and check that files can be written there.

    Raises:
        PlanError: If they cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise PlanError(
            f"{directory}: cannot write there ({error.strerror}); make it, and all above it, a directory "
            "that can be written"
        ) from None


def remove_checkouts(directory: Path, repository: Repository | None) -> None:
    """Remove both worktrees of a comparison, and its environments."""
    for side in SIDES:
        if repository is not None:
            repository.remove_worktree(directory / side)
    shutil.rmtree(directory, ignore_errors=True)


def clean(root: Path, repository: Repository | None) -> list[str]:
    """Remove what stopped or kept comparisons of a project have left, unless a process runs them.

    Returns:
        One line with the size of each directory, or a line that nothing was found.
    """
    states = root / ".llenergy" / DIRECTORY
    found = {path.parent.name: path.parent for path in states.glob(f"*/{PID}")}
    checkouts = {
        path.name.removeprefix(_prefix(root)): path
        for path in (cache_directory() / DIRECTORY).glob(f"{_prefix(root)}*")
    }
    lines = []
    for key in sorted({*found, *checkouts}):
        with _unless_running(found.get(key)) as who:
            for directory in filter(None, (found.get(key), checkouts.get(key))):
                if who is not None:
                    lines.append(f"kept {directory}: in use by process {who}")
                    continue
                size_mb = sum(path.lstat().st_size for path in directory.rglob("*")) / 1e6
                remove_checkouts(directory, repository)
                lines.append(f"removed {directory} ({size_mb:.1f} MB)")
    return lines or ["nothing to remove"]


@contextmanager
def _unless_running(state: Path | None) -> Iterator[str | None]:
    """Lock a comparison; yields the process that runs it, if one does."""
    if state is None:
        yield None
        return
    try:
        lock = _lock(state)
    except PlanError:
        yield _holder(state)
        return
    try:
        yield None
    finally:
        lock.release()


def _lock(directory: Path) -> BaseFileLock:
    from filelock import FileLock, Timeout

    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise PlanError(
            f"process {_holder(directory)} is running this comparison; wait for it or stop it, its "
            "measurements are kept"
        ) from None
    (directory / PID).write_text(str(os.getpid()))
    return lock


def _holder(directory: Path) -> str:
    with suppress(OSError):
        return (directory / PID).read_text(errors="replace")
    return "unknown"


def _prefix(root: Path) -> str:
    """Return how the names of all directories of checkouts of a project begin."""
    return f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-"


def _read_summary(files: SessionFiles) -> SessionSummary | None:
    try:
        return msgspec.json.decode(read_limited(files.summary), type=SessionSummary)
    except (OSError, *MALFORMED):
        return None


def explain_unfinished(files: SessionFiles, exit_status: int) -> str | None:
    """Return why an attempt did not run all tests and write a complete report, or ``None`` if it did."""
    if exit_status < 0:
        return f"was killed by signal {-exit_status}"
    how = f"ended with exit code {exit_status}"
    if exit_status == NOTHING_COLLECTED and not files.stem.endswith(".1"):
        # Earlier attempts have measured all.
        return None
    if exit_status not in FINISHED_EXIT_CODES:
        return how
    summary = _read_summary(files)
    if summary is None:
        return f"{how} before all had run"
    if summary.stopped:
        return f"{how} and was stopped before all tests had run"
    if not summary.measured:
        return None
    if not files.report.exists():
        return f"{how} but did not write its report"
    return None if _read_saved(files.report).run.complete else f"{how} but its report is incomplete"


def _read_saved(path: Path) -> Report:
    try:
        return read_report(path)
    except ReportError as error:
        raise PlanError(
            f"{error}; llenergy ab --fresh discards the measurements of this comparison and starts again"
        ) from None


def _read_report(files: SessionFiles) -> Report | None:
    """Return the report of an attempt, or one made from its journal; ``None`` if it measured nothing."""
    if files.report.exists():
        return _read_saved(files.report)
    for journal in find_journals(files.report):
        with suppress(ReportError):
            return read_report(journal)
    return None
