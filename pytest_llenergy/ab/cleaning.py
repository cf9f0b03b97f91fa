# SPDX-License-Identifier: Apache-2.0
"""Find and remove what stopped comparisons have left: checkouts, environments and measurements.

The checkouts of a project are outside it, so they remain when the project is cleaned. They are found by their
directory's name, which contains a hash of the project's path: in the cache, and among git's worktrees.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pytest_llenergy.ab.checkouts import Repository, remove_checkout
from pytest_llenergy.ab.state import (
    DIRECTORY,
    LOCK,
    PID,
    PROJECT,
    SESSIONS,
    checkout_directory,
    checkout_prefix,
    has_measured,
    is_kept,
    list_unfinished,
)
from pytest_llenergy.record.base import cache_directory
from pytest_llenergy.record.text import escape_invisible

#: Checkouts of a stopped comparison are removed after this time. Its measurements are kept.
MAX_UNUSED_DAYS = 7

SIDES = ("base", "head")

DAY_S = 86400.0


def remove_abandoned(root: Path, repository: Repository | None, current: str) -> list[str]:
    """Remove checkouts of other comparisons that nothing will continue. Measurements are kept.

    These are the checkouts without state in the project, and those unused for ``MAX_UNUSED_DAYS``, unless
    they were kept on purpose.

    Args:
        root: The project.
        repository: Its repository, if any.
        current: Key of the comparison that is about to run.

    Returns:
        A line for each directory removed.
    """
    lines = []
    for directory in _list_checkouts(root, repository):
        key = _key(directory, root)
        state = _state_directory(root, key)
        if key == current or is_kept(root, key):
            continue
        if (state / "inputs.json").exists() and _unused_days(directory) < MAX_UNUSED_DAYS:
            continue
        lines += _remove(directory, "checkouts of a stopped comparison", repository, directory, state)
    return lines


def discard(root: Path, repository: Repository | None, key: str) -> None:
    """Remove a comparison with its measurements, unless a process runs it."""
    state, checkouts = _state_directory(root, key), checkout_directory(root, key)
    with _locked(state, checkouts) as free:
        if free:
            shutil.rmtree(state, ignore_errors=True)
            remove_checkouts(checkouts, repository)


def discard_all(root: Path, repository: Repository | None) -> None:
    """Discard all unfinished comparisons."""
    for key in list(list_unfinished(root)):
        discard(root, repository, key)


def discard_empty(root: Path, repository: Repository | None, current: str) -> None:
    """Discard other unfinished comparisons that measured nothing."""
    for key in list(list_unfinished(root)):
        if key != current and not has_measured(root, key):
            discard(root, repository, key)


def clean(root: Path, repository: Repository | None) -> list[str]:
    """Remove everything of comparisons that no process runs, and checkouts of projects that are gone.

    Returns:
        One line with the size of each directory, or a line that nothing was found.
    """
    lines = []
    for checkouts in _list_checkouts(root, repository):
        state = _state_directory(root, _key(checkouts, root))
        lines += _remove(checkouts, "checkouts and environments", repository, checkouts, state)
    for state in sorted(path.parent for path in _state_directory(root, "").glob("*/inputs.json")):
        count = len(list(state.glob(f"{SESSIONS}/*.json")))
        what = f"measurements of {count} session{'' if count == 1 else 's'}, logs"
        lines += _remove(state, what, repository, state, checkout_directory(root, state.name))
    for project in sorted((cache_directory() / DIRECTORY).glob(f"*/{PROJECT}")):
        # Paths may contain any bytes.
        path = os.fsdecode(project.read_bytes())
        if not Path(path).exists():
            what = f"checkouts of {escape_invisible(path)}, which is gone"
            lines += _remove(project.parent, what, None, project.parent)
    return lines or ["nothing to remove"]


def remove_checkouts(directory: Path, repository: Repository | None) -> None:
    """Remove both worktrees of a comparison, and its environments."""
    for side in SIDES:
        remove_checkout(repository, directory / side)
    shutil.rmtree(directory, ignore_errors=True)


def _remove(directory: Path, what: str, repository: Repository | None, *locked: Path) -> list[str]:
    """Remove a directory unless a process uses one of those with a lock. Returns what was done."""
    with _locked(*locked) as free:
        if not free:
            pids = (place.read_text(errors="replace") for path in locked if (place := path / PID).is_file())
            return [f"kept {directory}: in use by process {next(pids, 'unknown')}"]
        size_mb = _size_bytes(directory) / 1e6
        remove_checkouts(directory, repository)
    if directory.exists():
        return [f"could not remove all of {directory}; remove it by hand"]
    return [f"removed {directory} ({what}; {size_mb:.{0 if size_mb >= 10 else 1}f} MB)"]


@contextmanager
def _locked(*directories: Path) -> Iterator[bool]:
    """Lock directories, if they exist; yields False if another process has locked one."""
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        free = True
        try:
            for directory in filter(Path.is_dir, directories):
                stack.enter_context(FileLock(directory / LOCK).acquire(timeout=0))
        except Timeout:
            free = False
        yield free


def _list_checkouts(root: Path, repository: Repository | None) -> Sequence[Path]:
    """Return the directories of the project's checkouts: in the cache, and those that git knows."""
    places = list((cache_directory() / DIRECTORY).glob("*"))
    if repository is not None:
        places += [path.parent for path in repository.list_worktrees() if path.name in SIDES]
    return sorted({path for path in places if path.parent.name == DIRECTORY and _key(path, root)})


def _key(directory: Path, root: Path) -> str:
    """Return the key in the name of a directory of checkouts; empty if it is not of this project."""
    found = re.fullmatch(rf"{re.escape(checkout_prefix(root))}([0-9a-f]{{12}})", directory.name)
    return found.group(1) if found else ""


def _state_directory(root: Path, key: str) -> Path:
    return root / ".llenergy" / DIRECTORY / key


def _unused_days(directory: Path) -> float:
    """Return the time since a comparison was last started in these checkouts."""
    with suppress(OSError):
        return (time.time() - (directory / PROJECT).stat().st_mtime) / DAY_S
    return 0.0


def _size_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total
