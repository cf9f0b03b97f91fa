# SPDX-License-Identifier: Apache-2.0
"""The state of an unfinished comparison on disk, so that the same command resumes it.

Each attempt at a session has separate files. A session counts as finished only if pytest ended regularly and
its report is complete, so that a comparison can be resumed after ``kill -9``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_llenergy.ab.schedule import Turn
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.record.base import MALFORMED, StoredStruct, cache_directory
from pytest_llenergy.record.environment import read_boot_id
from pytest_llenergy.record.files import read_limited, replace_file
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.text import format_time
from pytest_llenergy.report.store import JOURNAL_SUFFIX, find_journals, read_report

if TYPE_CHECKING:
    from filelock import BaseFileLock

DIRECTORY = "ab"

#: Files of a comparison: its lock and the process that holds it; with its checkouts, the project's path.
LOCK, PID, PROJECT = "lock", "pid", "project"

#: Directories with the sessions of a comparison, or of each of several.
SESSIONS = "sessions*"

#: Marks a comparison that is kept but never resumed.
FINISHED = "finished"

#: Exit codes of pytest after which every test has run.
FINISHED_EXIT_CODES = (0, 1)
#: That of a usage error, such as a path that does not exist, and of a run without tests.
NO_SUCH_PATH, NOTHING_COLLECTED = 4, 5

MISSING_PATH = re.compile(r"^ERROR: file or directory not found: ", re.MULTILINE)


class CampaignInputs(StoredStruct, frozen=True):
    """Everything that identifies a comparison: if any value differs, it is another comparison.

    ``sides`` has commit, working tree, options and interpreter of each side. ``to_itself`` is for repeated
    comparisons of one side with itself, of which there may be more the next time.
    """

    tool: str
    command: list[str]
    directory: str
    sides: dict[str, list[str]]
    pairs: str
    rounds: int
    setup: str | None
    metrics: list[str]
    across: bool
    to_itself: bool = False

    @property
    def key(self) -> str:
        """A short hash of all values."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


class SessionEnd(StoredStruct, frozen=True):
    """How a session ended. Times are RFC 3339 in UTC."""

    exit_status: int
    started_at: str
    finished_at: str
    duration_s: float
    boot: str


class SessionSummary(StoredStruct, frozen=True):
    """What ``session_plugin`` writes at the end of a session.

    ``failed`` are node ids, ``skipped`` those of modules skipped as a whole. ``measured`` is whether any test
    measured energy, and ``stopped`` whether the session ended before all tests had run.
    """

    failed: list[str]
    measured: bool
    stopped: bool
    skipped: tuple[str, ...] = ()


class State:
    """The locked directory of one comparison. Its worktrees and environments are in ``checkouts``."""

    def __init__(self, root: Path, inputs: CampaignInputs) -> None:
        """Lock the directory.

        Raises:
            PlanError: If another process runs the same comparison.
        """
        self.inputs = inputs
        self.root = root
        self.directory: Path = root / ".llenergy" / DIRECTORY / inputs.key
        self.checkouts: Path = checkout_directory(root, inputs.key)
        self._locks: list[BaseFileLock] = []
        self._part = ""
        self._acquire(self.directory)
        replace_file(self.directory.parent / ".gitignore", b"*\n")
        if self._finished.exists():
            for directory in self.directory.glob(SESSIONS):
                shutil.rmtree(directory)
            self._finished.unlink()
        replace_file(self.directory / "inputs.json", msgspec.json.format(msgspec.json.encode(inputs)))

    def part(self, number: int) -> State:
        """Return the state of one of several comparisons with the same sides, which share all else."""
        other = copy(self)
        other._part = f"-{number:03d}"
        return other

    def use_checkouts(self) -> Path:
        """Lock the directory for checkouts, which the removal of unused ones respects, and return it.

        Raises:
            PlanError: If another process runs the same comparison. The lock in the project does not tell if
                the project was cleaned meanwhile.
        """
        self._acquire(self.checkouts)
        (self.checkouts / PROJECT).write_bytes(os.fsencode(self.root))
        return self.checkouts

    def _acquire(self, directory: Path) -> None:
        from filelock import FileLock, Timeout

        make_directory(directory)
        lock, pid = FileLock(directory / LOCK), directory / PID
        try:
            lock.acquire(timeout=0)
        except Timeout:
            who = pid.read_text(errors="replace") if pid.is_file() else "unknown"
            raise PlanError(
                f"process {who} is running this comparison; wait for it or stop it, its measurements are kept"
            ) from None
        pid.write_text(str(os.getpid()))
        self._locks.append(lock)

    @property
    def _finished(self) -> Path:
        return self.directory / FINISHED

    def load_finished(self, turn: Turn) -> tuple[list[Report], SessionEnd] | None:
        """Return the reports of all attempts at a finished session, or ``None`` if it must run."""
        attempts = self._attempts(turn)
        end = _read_end(attempts[-1]) if attempts else None
        if end is None or self.explain_unfinished(turn, end.exit_status) is not None:
            return None
        reports = self.load_reports(turn)
        return (reports, end) if reports else None

    def explain_unfinished(self, turn: Turn, exit_status: int) -> str | None:
        """Return why the last attempt did not finish its session, or ``None`` if it did.

        A later attempt that has no tests left exits with "no tests collected", which is fine.
        """
        attempts = self._attempts(turn)
        if exit_status == NOTHING_COLLECTED and len(attempts) > 1:
            return None
        return _explain_unfinished(attempts[-1], exit_status)

    def lacks_tests(self, turn: Turn, exit_status: int, directory: Path) -> bool:
        """Return whether the last attempt ran as it should, but there is no energy test.

        Args:
            turn: The session.
            exit_status: Exit code of pytest.
            directory: Where it started.
        """
        files = self._attempts(turn)[-1]
        if exit_status == NO_SUCH_PATH:
            # Pytest names one missing path, but others may exist.
            found = MISSING_PATH.findall(files.log.read_text(errors="replace"))
            words = [word.partition("::")[0] for word in self.inputs.command]
            return bool(found) and not any((directory / word).exists() for word in words if word)
        summary = _read_summary(files)
        ran = exit_status in (0, NOTHING_COLLECTED) and not files.report.exists()
        return ran and summary is not None and not (summary.failed or summary.measured or summary.stopped)

    def list_failed_tests(self, turn: Turn) -> set[str]:
        """Return the node ids of the tests that failed in a session, with or without a measurement."""
        summaries = [_read_summary(files) for files in self._attempts(turn)]
        return {name for each in summaries if each is not None for name in each.failed}

    def list_skipped_modules(self, turn: Turn) -> set[str]:
        """Return the node ids of the modules that a session skipped as a whole."""
        summaries = [_read_summary(files) for files in self._attempts(turn)]
        return {name for each in summaries if each is not None for name in each.skipped}

    def load_reports(self, turn: Turn) -> list[Report]:
        """Return the reports of all attempts at a session, finished or not."""
        return [report for files in self._attempts(turn) if (report := _read_report(files)) is not None]

    def list_import_directories(self, turn: Turn) -> list[Path]:
        """Return, for each attempt, the directory that lists its imports."""
        return [files.modules for files in self._attempts(turn)]

    def discard(self, turn: Turn) -> None:
        """Delete the measurements of a session."""
        for files in self._attempts(turn):
            for path in (files.end, files.summary, files.report, files.log, *find_journals(files.report)):
                path.unlink(missing_ok=True)
            shutil.rmtree(files.modules, ignore_errors=True)

    def next_attempt(self, turn: Turn) -> SessionFiles:
        """Return the files for another attempt."""
        count = len(self._attempts(turn))
        return SessionFiles(self._sessions(), f"{_file_stem(turn)}.{count + 1}")

    def record_end(
        self, files: SessionFiles, exit_status: int, started: datetime, duration_s: float
    ) -> SessionEnd:
        """Record how an attempt ended.

        Args:
            files: The files of the attempt.
            exit_status: Exit code of pytest, negative for a signal.
            started: When the attempt started.
            duration_s: Duration of the attempt (seconds).
        """
        end = SessionEnd(
            exit_status=exit_status,
            started_at=format_time(started),
            finished_at=format_time(datetime.now(timezone.utc)),
            duration_s=duration_s,
            boot=read_boot_id(),
        )
        replace_file(files.end, msgspec.json.encode(end))
        return end

    @property
    def finished_sessions(self) -> int:
        """The number of finished sessions."""
        ends_of_all = self.directory.glob(f"{SESSIONS}/*.end")
        found = [SessionFiles(path.parent, path.stem) for path in ends_of_all]
        ends = [(files, _read_end(files)) for files in found]
        return sum(
            end is not None and _explain_unfinished(files, end.exit_status) is None for files, end in ends
        )

    def finish(self, *, keep: bool) -> None:
        """Delete the files of the comparison or, with ``keep``, mark it so that it is never resumed."""
        if keep:
            self._finished.touch()
            self.release()
            return
        self.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Release the locks."""
        for lock in self._locks:
            Path(lock.lock_file).with_name(PID).unlink(missing_ok=True)
            lock.release()
        self._locks.clear()

    def _attempts(self, turn: Turn) -> list[SessionFiles]:
        count = len(list(self._sessions().glob(f"{_file_stem(turn)}.*.log")))
        return [SessionFiles(self._sessions(), f"{_file_stem(turn)}.{each}") for each in range(1, count + 1)]

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


def checkout_directory(root: Path, key: str) -> Path:
    """Return where the checkouts of a comparison are.

    This is outside the user's checkout, where pytest would find its settings for a commit that has none.
    """
    return cache_directory() / DIRECTORY / f"{checkout_prefix(root)}{key}"


def checkout_prefix(root: Path) -> str:
    """Return how the names of all directories of checkouts of a project begin."""
    return f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-"


def list_unfinished(root: Path) -> Iterator[str]:
    """Yield the keys of unfinished comparisons."""
    for path in sorted((root / ".llenergy" / DIRECTORY).glob("*/inputs.json")):
        if not (path.parent / FINISHED).exists():
            yield path.parent.name


def is_kept(root: Path, key: str) -> bool:
    """Return whether a finished comparison was kept with ``--keep``."""
    return (root / ".llenergy" / DIRECTORY / key / FINISHED).exists()


def has_measured(root: Path, key: str) -> bool:
    """Return whether an unfinished comparison has measured anything."""
    directory = root / ".llenergy" / DIRECTORY / key
    endings = (".json", JOURNAL_SUFFIX)
    return any(path.name.endswith(endings) for path in directory.glob(f"{SESSIONS}/*"))


def _file_stem(turn: Turn) -> str:
    return f"{turn.number:03d}-{turn.side}"


def _read_end(files: SessionFiles) -> SessionEnd | None:
    try:
        return msgspec.json.decode(read_limited(files.end), type=SessionEnd)
    except (OSError, *MALFORMED):
        return None


def _read_summary(files: SessionFiles) -> SessionSummary | None:
    try:
        return msgspec.json.decode(read_limited(files.summary), type=SessionSummary)
    except (OSError, *MALFORMED):
        return None


def _explain_unfinished(files: SessionFiles, exit_status: int) -> str | None:
    """Return why an attempt did not run all tests and write a complete report, or ``None`` if it did."""
    if exit_status < 0:
        return f"was killed by signal {-exit_status}"
    how = f"ended with exit code {exit_status}"
    if exit_status not in FINISHED_EXIT_CODES:
        return how
    summary = _read_summary(files)
    if summary is None:
        return f"{how} before pytest had finished"
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
