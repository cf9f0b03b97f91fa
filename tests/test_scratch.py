# SPDX-License-Identifier: Apache-2.0
"""Directories that killed processes have left are removed by the next run, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy import scratch
from pytest_llenergy.scratch import PREFIX, ScratchDirectory, sweep

#: Makes a directory, and a child that inherits its lock; then waits.
HOLD = """
import subprocess, sys, time
from pathlib import Path
from pytest_llenergy.scratch import ScratchDirectory
scratch = ScratchDirectory(Path(sys.argv[1]))
(scratch.path / "message-1").write_text("data")
child = subprocess.Popen(["sleep", "300"], pass_fds=[scratch.descriptor])
print(scratch.path, child.pid, flush=True)
time.sleep(300)
"""


def start_holder(parent: Path) -> tuple[subprocess.Popen[str], Path, int]:
    """Start ``HOLD``. Returns it, its directory, and the pid of its child."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    path, child = holder.stdout.readline().split()
    return holder, Path(path), int(child)


def test_a_directory_is_removed_once_every_process_with_its_lock_was_killed(tmp_path: Path) -> None:
    holder, path, child = start_holder(tmp_path)
    with holder:
        sweep(tmp_path)
        assert (path / "message-1").exists()
        holder.kill()
    sweep(tmp_path)
    assert path.exists()
    os.kill(child, signal.SIGKILL)
    while path.exists():
        sweep(tmp_path)


def test_the_first_directory_of_a_process_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_swept", set())
    (tmp_path / f"{PREFIX}stale").mkdir()
    with ScratchDirectory(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine.path]
        sweep(tmp_path)
        assert mine.path.exists()
    assert list(tmp_path.iterdir()) == []


def test_links_files_and_other_names_stay(tmp_path: Path) -> None:
    parent, elsewhere = tmp_path / "parent", tmp_path / "elsewhere"
    for each in (parent, elsewhere, parent / "llenergy-abcd1234", parent / "llenergy-00000000-other_host"):
        each.mkdir()
    (elsewhere / "file").touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    stale = parent / f"{PREFIX}stale"
    stale.mkdir()
    (stale / "link").symlink_to(elsewhere)
    before = set(parent.iterdir())
    sweep(parent)
    assert before - set(parent.iterdir()) == {stale}
    assert (elsewhere / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_directories_of_other_users_stay(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    sweep(tmp_path)
    assert other.exists()


def test_a_directory_that_is_swept_before_it_is_locked_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[Path] = []

    def sweep_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        swept.extend(tmp_path.iterdir())
        sweep(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    monkeypatch.setattr(scratch, "_swept", {tmp_path})
    with ScratchDirectory(tmp_path) as mine:
        assert len(swept) == 1
        assert mine.path.is_dir()
        assert mine.path not in swept


def test_a_directory_that_is_swept_before_it_is_opened_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    swept: list[str] = []

    def sweep_at_once(**where: Any) -> str:
        made: str = make(**where)
        if not swept:
            swept.append(made)
            sweep(tmp_path)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", sweep_at_once)
    monkeypatch.setattr(scratch, "_swept", {tmp_path})
    with ScratchDirectory(tmp_path) as mine:
        assert mine.path.is_dir()
        assert str(mine.path) not in swept
