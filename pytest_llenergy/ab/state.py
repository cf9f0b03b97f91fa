# SPDX-License-Identifier: Apache-2.0
"""What is on disk of a comparison that has not come to its end, so that the same command goes on with it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from pytest_llenergy.ab.schedule import Turn
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.errors import PlanError, ReportError
from pytest_llenergy.model.base import StoredStruct, cache_directory
from pytest_llenergy.model.report import Report
from pytest_llenergy.report.store import JOURNAL_SUFFIX, find_journals, read_report, replace_file

#: Changes at every boot (proc(5)).
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

DIRECTORY = "ab"

#: Exit codes of pytest with which a session has come to its end: every test had its turn.
FINISHED_EXIT_CODES = (0, 1)


class CampaignInputs(StoredStruct, frozen=True):
    """Everything that makes a comparison: another value is another comparison.

    ``sides`` name commit, working tree, options and interpreter of each.
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

    @property
    def key(self) -> str:
        """A short name for it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:12]


class SessionEnd(StoredStruct, frozen=True):
    """How a session ended. Times are RFC 3339 in UTC."""

    exit_status: int
    started_at: str
    finished_at: str
    duration_s: float
    boot: str


class SessionSummary(StoredStruct, frozen=True):
    """What pytest says at the end of a session: tests that failed, and whether any has measured.

    ``cut`` is whether it was stopped before all had run.
    """

    failed: list[str]
    measured: bool
    cut: bool


class State:
    """The directory of one comparison, locked. ``checkouts`` is where its worktrees and environments are."""

    def __init__(self, root: Path, asked: CampaignInputs) -> None:
        """Raises ``PlanError`` where another process is at the same comparison."""
        from filelock import FileLock, Timeout

        self.asked = asked
        self.directory: Path = root / ".llenergy" / DIRECTORY / asked.key
        self.checkouts: Path = checkout_directory(root, asked.key)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory.parent / ".gitignore").write_text("*\n")
        self._lock = FileLock(self.directory / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            pid = self._pid.read_text() if self._pid.exists() else "unknown"
            raise PlanError(
                f"process {pid} is at this comparison; wait for it or end it, what it has measured is kept"
            ) from None
        self._pid.write_text(str(os.getpid()))
        if self._finished.exists():
            shutil.rmtree(self._sessions())
            self._finished.unlink()
        replace_file(self.directory / "asked.json", msgspec.json.format(msgspec.json.encode(asked)))

    @property
    def _finished(self) -> Path:
        return self.directory / "finished"

    @property
    def _pid(self) -> Path:
        return self.directory / "pid"

    def ended(self, turn: Turn) -> tuple[list[Report], SessionEnd] | None:
        """What a session has measured, over all attempts at it; ``None`` where it is to be run."""
        attempts = self._attempts(turn)
        end = _read_end(attempts[-1]) if attempts else None
        if end is None or self.unfinished(turn, end.exit_status) is not None:
            return None
        measured = self.measured(turn)
        return (measured, end) if measured else None

    def unfinished(self, turn: Turn, exit_status: int) -> str | None:
        """How the last attempt at a session ended before its tests did; ``None`` for one that is done.

        One that had nothing left to do says that it has found no tests.
        """
        attempts = self._attempts(turn)
        if exit_status == 5 and len(attempts) > 1:
            return None
        return _why_unfinished(attempts[-1], exit_status)

    def failed(self, turn: Turn) -> set[str]:
        """Tests that failed in it, measured or not, by their node ids."""
        told = [_read_summary(files) for files in self._attempts(turn)]
        return {name for each in told if each is not None for name in each.failed}

    def measured(self, turn: Turn) -> list[Report]:
        """What attempts at it have measured, whether they came to their end or not."""
        return [report for files in self._attempts(turn) if (report := _read_report(files)) is not None]

    def modules(self, turn: Turn) -> list[Path]:
        """Where each attempt has noted what it imported from where."""
        return [files.modules for files in self._attempts(turn)]

    def discard(self, turn: Turn) -> None:
        """Forget what a session has measured."""
        for files in self._attempts(turn):
            for path in (files.end, files.told, files.report, files.log, *find_journals(files.report)):
                path.unlink(missing_ok=True)
            shutil.rmtree(files.modules, ignore_errors=True)

    def next_attempt(self, turn: Turn) -> SessionFiles:
        """Files for another attempt."""
        count = len(self._attempts(turn))
        return SessionFiles(self._sessions(), f"{_file_stem(turn)}.{count + 1}")

    def note(self, files: SessionFiles, exit_status: int, started: datetime, duration_s: float) -> SessionEnd:
        """Write down how an attempt ended."""
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
    def sessions(self) -> int:
        """How many have come to their end."""
        found = [SessionFiles(self._sessions(), path.stem) for path in self._sessions().glob("*.end")]
        ends = [(files, _read_end(files)) for files in found]
        return sum(end is not None and _why_unfinished(files, end.exit_status) is None for files, end in ends)

    def finish(self, *, keep: bool) -> None:
        """Everything has been said: throw away what was measured or, to ``keep`` it, do not go on with it."""
        if keep:
            self._finished.touch()
            self.release()
            return
        self.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Let others have it."""
        self._pid.unlink(missing_ok=True)
        self._lock.release()

    def _attempts(self, turn: Turn) -> list[SessionFiles]:
        count = len(list(self._sessions().glob(f"{_file_stem(turn)}.*.log")))
        return [SessionFiles(self._sessions(), f"{_file_stem(turn)}.{each}") for each in range(1, count + 1)]

    def _sessions(self) -> Path:
        directory = self.directory / "sessions"
        directory.mkdir(exist_ok=True)
        return directory


def checkout_directory(root: Path, key: str) -> Path:
    """Outside the user's checkout: pytest would look there for the settings of one that has none."""
    return (
        cache_directory()
        / DIRECTORY
        / f"{root.name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-{key}"
    )


def list_unfinished(root: Path) -> Iterator[str]:
    """The keys of comparisons that have not come to their end."""
    for asked in sorted((root / ".llenergy" / DIRECTORY).glob("*/asked.json")):
        if not (asked.parent / "finished").exists():
            yield asked.parent.name


def has_measured(root: Path, key: str) -> bool:
    """Whether an unfinished comparison holds anything worth keeping."""
    sessions = root / ".llenergy" / DIRECTORY / key / "sessions"
    return any(sessions.glob("*.json")) or any(sessions.glob(f"*{JOURNAL_SUFFIX}"))


def discard_campaign(root: Path, key: str) -> bool:
    """Throw an unfinished comparison away, unless somebody is at it. Its checkouts are the caller's."""
    from filelock import FileLock, Timeout

    directory = root / ".llenergy" / DIRECTORY / key
    lock = FileLock(directory / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    shutil.rmtree(directory, ignore_errors=True)
    return True


def read_boot_id() -> str:
    """Which boot of the machine this is; empty where it cannot be told."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC."""
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _file_stem(turn: Turn) -> str:
    return f"{turn.number:03d}-{turn.side}"


def _read_end(files: SessionFiles) -> SessionEnd | None:
    try:
        return msgspec.json.decode(files.end.read_bytes(), type=SessionEnd)
    except (OSError, msgspec.DecodeError):
        return None


def _read_summary(files: SessionFiles) -> SessionSummary | None:
    try:
        return msgspec.json.decode(files.told.read_bytes(), type=SessionSummary)
    except (OSError, msgspec.DecodeError):
        return None


def _why_unfinished(files: SessionFiles, exit_status: int) -> str | None:
    """How an attempt ended that did not come to the end of its tests and of its report."""
    if exit_status < 0:
        return f"was ended by signal {-exit_status}"
    how = f"ended with exit code {exit_status}"
    if exit_status not in FINISHED_EXIT_CODES:
        return how
    told = _read_summary(files)
    if told is None:
        return f"{how} before pytest's own end"
    if told.cut:
        return f"{how} and was stopped before all its tests had run"
    if not told.measured:
        return None
    if not files.report.exists():
        return f"{how} and could not write its report"
    return None if read_report(files.report).run.complete else f"{how} and an incomplete report"


def _read_report(files: SessionFiles) -> Report | None:
    """The report of an attempt, or what its journal amounts to; ``None`` where it had measured nothing."""
    if files.report.exists():
        return read_report(files.report)
    for journal in find_journals(files.report):
        with suppress(ReportError):
            return read_report(journal)
    return None
