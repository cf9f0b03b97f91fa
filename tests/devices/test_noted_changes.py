# SPDX-License-Identifier: Apache-2.0
"""Notes of changed boards: which ones count, and what a killed run's note does to a board.

The real pynvml changes a simulated board. ``test_board_settings`` kills whole runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pytest_llenergy.devices.lockdir import LockDirectory, open_lock_directory
from pytest_llenergy.devices.noted_changes import Change, Note, describe_left_changes, restore_left_changes

from ..nvml_sim import Board, World
from .lockers import USERS, needs_root

FACTORY, CHANGED = (700.0, (0, 0)), (300.0, (1200, 1200))
LIMIT = Change("GPU-a", before_mw=700_000, set_mw=300_000)
CLOCKS = Change("GPU-a", locks_clocks=True)

#: Notes a change and keeps the note until it is killed.
KEEPER = """
import sys
import msgspec
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.devices.noted_changes import Change, Note
note = Note(open_lock_directory(), msgspec.json.decode(sys.argv[1], type=Change))
note.write()
print(flush=True)
sys.stdin.read()
"""

#: Takes every lock that a reader of a file can take.
HOLDER = """
import fcntl, os, sys
if os.geteuid() == 0:
    os.setuid(int(sys.argv[2]))
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
fcntl.lockf(descriptor, fcntl.LOCK_SH)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def world(tmp_path: Path, nvml_attach: Callable[[World], ModuleType]) -> World:
    world = World(tmp_path / "world", [Board(uuid="GPU-a"), Board(uuid="GPU-b")])
    nvml_attach(world)
    world.update(0, power_limit_w=300.0, locked_clocks_mhz=(1200, 1200))
    return world


@pytest.fixture
def directory(locks: Path) -> Iterator[LockDirectory]:
    directory = open_lock_directory()
    yield directory
    directory.close()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts a script and returns when it has printed a line."""
    started = []

    def start(script: str, *args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, *args]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., subprocess.Popen[bytes]]


def leave(directory: LockDirectory, *changes: Change) -> list[Path]:
    """Leave notes of changes as a killed run does."""
    for each in changes:
        note = Note(directory, each)
        note.write()
        note.leave()
    return files(directory)


def files(directory: LockDirectory) -> list[Path]:
    return sorted(directory.path.glob("*settings*"))


def restore(world: World, directory: LockDirectory, uuid: str = "GPU-a") -> object:
    """Restore a board as the next test does. Returns power limit and clocks of the first."""
    restore_left_changes(directory, [uuid])
    board = world.board(0)
    return board.power_limit_w, board.locked_clocks_mhz


def test_what_is_left_on_a_leased_board_is_put_back(world: World, directory: LockDirectory) -> None:
    leave(directory, LIMIT, CLOCKS)
    assert restore(world, directory, "GPU-b") == CHANGED, "another board"
    assert restore(world, directory) == FACTORY
    assert not files(directory)


def test_a_limit_that_somebody_has_set_since_stays(world: World, directory: LockDirectory) -> None:
    leave(directory, LIMIT)
    world.update(0, power_limit_w=450.0)
    assert restore(world, directory) == (450.0, (1200, 1200))
    assert not files(directory)


def test_no_other_user_can_make_a_left_note_look_kept(
    world: World, directory: LockDirectory, start: Start
) -> None:
    for path in leave(directory, LIMIT, CLOCKS):
        start(HOLDER, str(path), str(USERS[0]))
    assert len([*describe_left_changes(directory)]) == 2
    assert restore(world, directory) == FACTORY


def test_a_note_counts_once_its_writer_is_dead(world: World, directory: LockDirectory, start: Start) -> None:
    keeper = start(KEEPER, msgspec.json.encode(Change("GPU-a", 700_000, 300_000, locks_clocks=True)).decode())
    assert not [*describe_left_changes(directory)]
    assert restore(world, directory) == CHANGED
    keeper.kill()
    keeper.wait()
    assert restore(world, directory) == FACTORY


@pytest.mark.parametrize("mask", [0, 0o077])
def test_everybody_may_read_a_note_once_it_is_written(directory: LockDirectory, mask: int) -> None:
    before = os.umask(mask)
    try:
        note = Note(directory, LIMIT)
        modes = [files(directory)[0].stat().st_mode & 0o777]
        note.write()
    finally:
        os.umask(before)
    modes.append(files(directory)[0].stat().st_mode & 0o777)
    note.remove()
    # A lock that another process took before the writer would block it for good.
    assert (modes, files(directory)) == ([0o600, 0o644], [])


def test_a_note_that_was_never_written_is_removed(world: World, directory: LockDirectory) -> None:
    Note(directory, LIMIT).leave()
    assert not [*describe_left_changes(directory)]
    assert restore(world, directory) == CHANGED
    assert not files(directory)


@needs_root
def test_a_note_of_another_user_is_ignored(world: World, directory: LockDirectory) -> None:
    (path,) = leave(directory, LIMIT)
    os.chown(path, USERS[0], -1)
    assert not [*describe_left_changes(directory)]
    assert restore(world, directory) == CHANGED
    assert path.exists(), "its owner may restore the board"


def test_links_directories_and_pipes_in_the_place_of_notes_are_ignored(
    world: World, directory: LockDirectory
) -> None:
    (path,) = leave(directory, LIMIT)
    for suffix in "abcd":
        path.with_name(path.name + suffix).hardlink_to(path)
    link, folder, pipe = (path.with_name(path.name + suffix) for suffix in "efh")
    link.symlink_to(path)
    folder.mkdir()
    # Opening it would wait for a writer.
    os.mkfifo(pipe)
    assert len([*describe_left_changes(directory)]) == 1
    # A link to the note must neither hide it nor outlive it.
    copy = directory.path / "kept"
    copy.hardlink_to(path)
    assert restore(world, directory) == (700.0, (1200, 1200))
    assert files(directory) == [link, folder, pipe], "neither was opened as a note"
    world.update(0, power_limit_w=300.0)
    copy.rename(path.with_name(path.name + "g"))
    assert restore(world, directory) == CHANGED


@pytest.mark.parametrize(
    ("boot", "expected"),
    [("00000000-0000-4000-8000-000000000000", CHANGED), ("", FACTORY), (None, FACTORY)],
)
def test_a_note_ends_with_a_reboot(
    world: World,
    directory: LockDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    boot: str | None,
    expected: object,
) -> None:
    """The board has forgotten the change, so what it has is somebody else's."""
    leave(directory, LIMIT, CLOCKS)
    monkeypatch.setattr("pytest_llenergy.record.environment.BOOT_ID", tmp_path / "boot")
    if boot is not None:
        (tmp_path / "boot").write_text(boot)
    assert bool([*describe_left_changes(directory)]) is (expected == FACTORY)
    assert restore(world, directory) == expected
    assert not files(directory)


WATTS, STAYS = "a power limit of 300 W", "which stays; as root: rm"
RUN = "as root, run a test that leases it, or: nvidia-smi -i GPU-a"


@pytest.mark.parametrize(
    ("noted", "board", "line", "wrong"),
    [
        (LIMIT, {}, f"has left {WATTS} on it; {RUN} -pl 700; rm", True),
        (
            LIMIT,
            {"power_limit_w": 450.0},
            f"noted {WATTS}, but the board has 450 W, {STAYS}",
            False,
        ),
        (LIMIT, {"lost": True}, f"may have left {WATTS} on it; {RUN} -pl 700; rm", True),
        (
            Change("GPU-a", 300_000, 300_000),
            {},
            f"noted {WATTS}, but the board has 300 W, {STAYS}",
            False,
        ),
        (CLOCKS, {}, f"may have left locked graphics clocks on it; {RUN} -rgc; rm", True),
    ],
)
def test_a_note_is_described_by_what_the_board_has(
    world: World,
    directory: LockDirectory,
    noted: Change,
    board: dict[str, object],
    line: str,
    wrong: bool,
) -> None:
    (path,) = leave(directory, noted)
    world.update(0, **board)
    ((text, in_force),) = describe_left_changes(directory)
    assert (text, in_force) == (f"GPU-a: a killed run {line} {path}", wrong)
