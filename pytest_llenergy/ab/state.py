# SPDX-License-Identifier: Apache-2.0
"""The state of an unfinished comparison on disk, so that the same command resumes it.

Each session has a directory. It counts only if it ended regularly and its report is complete, so that a
comparison can be resumed after ``kill -9``; the session that was stopped runs again.
"""

from __future__ import annotations

import hashlib
import shutil
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_llenergy.ab.repository import Repository
from pytest_llenergy.ab.session import SessionFiles, Summary, Turn
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import cache_directory
from pytest_llenergy.record.files import replace_file
from pytest_llenergy.record.report import Report, SideName
from pytest_llenergy.report.store import check_creatable, read_report

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: Of what need not be kept, in ``.llenergy``, where git ignores it, and in the cache.
DIRECTORY = "ab"

SIDES: tuple[SideName, SideName] = ("base", "head")

#: Exit codes of pytest after which every test has run; of a usage error, such as a path that does not exist;
#: and of a run without tests.
FINISHED_EXIT_CODES, NO_SUCH_PATH, NOTHING_COLLECTED = (0, 1), 4, 5


class State:
    """The directory of one comparison, of which a project runs one at a time.

    Its worktrees and environments are in ``checkouts``.
    """

    def __init__(self, root: Path, inputs: object, *, fresh: bool = False) -> None:
        """Lock the project; with ``fresh``, discard what was measured.

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
        self._lock = _lock(root)
        replace_file(self.directory.parent / ".gitignore", b"*\n")
        if fresh:
            for directory in self.directory.glob("sessions*"):
                shutil.rmtree(directory)

    def part(self, number: int) -> State:
        """Return the state of one of several comparisons with the same sides, which share all else."""
        other = copy(self)
        other._part = f"-{number:03d}"
        return other

    def files(self, turn: Turn) -> SessionFiles:
        """Return the files of a session."""
        return SessionFiles(self.directory / f"sessions{self._part}" / f"{turn.number:03d}-{turn.side}")

    def begin(self, turn: Turn) -> SessionFiles:
        """Make the directory of a session, without what an unfinished one has left there."""
        files = self.files(turn)
        shutil.rmtree(files.directory, ignore_errors=True)
        files.directory.mkdir(parents=True)
        return files

    def finish(self, repository: Repository | None) -> None:
        """Delete checkouts, environments and measurements."""
        remove_checkouts(self.checkouts, repository)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()


def explain_unfinished(files: SessionFiles, exit_status: int) -> str | None:
    """Return why a session did not run all tests and write a complete report, or ``None`` if it did."""
    if exit_status < 0:
        return f"was killed by signal {-exit_status}"
    if exit_status not in FINISHED_EXIT_CODES:
        return f"ended with exit code {exit_status}"
    summary, report = _load_summary(files), load_report(files)
    if summary is not None and not summary.stopped:
        complete = report.run.complete if report is not None else not summary.measured
        if complete:
            return None
    return f"ended with exit code {exit_status} before all tests had run"


def lacks_tests(files: SessionFiles, exit_status: int, paths: list[Path]) -> bool:
    """Return whether a session ran as it should, but there is no energy test.

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


def load_report(files: SessionFiles) -> Report | None:
    """Return the report of a session; ``None`` if it measured nothing."""
    return read_report(files.report) if files.report.exists() else None


def remove_checkouts(directory: Path, repository: Repository | None) -> None:
    """Remove both worktrees of a comparison, and its environments."""
    for side in SIDES:
        if repository is not None:
            repository.remove_worktree(directory / side)
    shutil.rmtree(directory, ignore_errors=True)


def clean(root: Path, repository: Repository | None) -> list[str]:
    """Remove what stopped comparisons of a project have left; return a line for each directory."""
    states = (root / ".llenergy" / DIRECTORY).glob("[0-9a-f]" * 12)
    found = [*states, *(cache_directory() / DIRECTORY).glob(f"{_prefix(root)}*")]
    if not found:
        return ["nothing to remove"]
    lock = _lock(root)
    for directory in found:
        remove_checkouts(directory, repository)
    lock.release()
    return [f"removed {directory}" for directory in found]


def _lock(root: Path) -> BaseFileLock:
    from filelock import FileLock, Timeout

    lock = FileLock(root / ".llenergy" / DIRECTORY / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise PlanError(
            "another llenergy ab runs in this project; wait for it or stop it, its measurements are kept"
        ) from None
    return lock


def _prefix(root: Path) -> str:
    """Return how the names of all directories of checkouts of a project begin."""
    return f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-"


def _load_summary(files: SessionFiles) -> Summary | None:
    try:
        return msgspec.json.decode(files.summary.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
