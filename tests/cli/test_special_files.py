# SPDX-License-Identifier: Apache-2.0
"""Every command refuses special files in one line, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llenergy.record import files

from ..energy.unprivileged import open_directory, unprivileged
from .bad_files import COMMANDS, PLACES, TOLERANT, build_project, find_place, run_command

#: One command for each kind of file, and each that reads it in another way.
READERS = [
    (kind, line)
    for kind, lines in COMMANDS.items()
    for line in {line.partition(" --format")[0]: line for line in lines if "=html" not in line}.values()
]


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # The path of a socket is limited to 107 bytes.
        before = Path.cwd()
        os.chdir(path.parent)
        server.bind(path.name)
        os.chdir(before)


def _make_sparse(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


#: How to make each, and what the message says.
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: None, "No such file or directory"),
    "directory": (Path.mkdir, "Is a directory"),
    "pipe": (os.mkfifo, "a device, pipe or socket; name a file"),
    "socket": (_make_socket, "No such device or address"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "a device, pipe or socket; name a file"),
    "empty device": (lambda path: path.symlink_to("/dev/null"), "a device, pipe or socket; name a file"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    "1 GB": (_make_sparse(10**9), "953 MiB, larger than 512 MiB, the limit; name a smaller file"),
    "100 GB": (_make_sparse(10**11), "95367 MiB, larger than 512 MiB, the limit; name a smaller file"),
}


#: A folder is a valid argument of ``llenergy comment``.
EMPTY_FOLDER = ("directory", "comment ab.json --dry-run")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    build_project(root)
    return root


@pytest.fixture
def project(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    shutil.copytree(pristine, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("COLUMNS", "200")
    return root


@pytest.mark.parametrize("what", KINDS)
def test_every_command_names_what_it_cannot_read(project: Path, what: str) -> None:
    make, message = KINDS[what]
    for kind, line in READERS:
        place = find_place(project, kind)
        content = place.read_bytes()
        place.unlink()
        make(place)
        outcome = run_command(line)
        texts = outcome.out + outcome.err
        if kind in ("entries", "accepted") and what in ("missing", "directory"):
            # A history has the files that are in its folders.
            assert outcome.code in (0, 2), (line, outcome)
        elif line.startswith(TOLERANT):
            assert outcome.code in (0, 1), (line, outcome)
            assert message in texts or what in ("missing", "dangling link"), (line, outcome)
        else:
            assert outcome.code == (0 if (what, line) == EMPTY_FOLDER else 2), (line, outcome)
            others = ("there is no .llenergy/", "no comparison for")
            assert message in texts or any(each in texts for each in others), (line, outcome)
        assert outcome.err.count("\n") <= 1
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        else:
            place.unlink(missing_ok=True)
        place.write_bytes(content)


def test_no_permission_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_directory() as root:
        build_project(root)
        monkeypatch.chdir(root)
        (root / "added").mkdir()
        (root / "added").chmod(0o777)
        for kind, line in READERS:
            # Imports what the command needs, which only root may read here.
            run_command(line)
            place = find_place(root, kind)
            place.chmod(0)
            with unprivileged():
                outcome = run_command(line)
            assert "Permission denied" in outcome.out + outcome.err, (line, outcome)
            assert outcome.code == 2 or line.startswith(TOLERANT), (line, outcome)
            assert outcome.err.count("\n") <= 1, (line, outcome)
            place.chmod(0o644)
        for directory in (".llenergy", "history", "jobs"):
            (root / directory).chmod(0)
            for kind, line in READERS:
                if PLACES[kind].startswith(directory):
                    with unprivileged():
                        outcome = run_command(line)
                    assert outcome.code in (0, 2), (line, outcome)
                    assert outcome.err.count("\n") == 1, (line, outcome)
            (root / directory).chmod(0o755)


def _change_after_the_size_is_known(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    real = os.fstat

    def changing(descriptor: int) -> os.stat_result:
        state = real(descriptor)
        change()
        return state

    monkeypatch.setattr(os, "fstat", changing)


def test_a_file_that_grows_while_it_is_read_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 20)
    path = project / "head.json"
    assert path.stat().st_size < 1 << 20

    def grow() -> None:
        with path.open("ab") as file:
            file.write(b" " * (2 << 20))

    _change_after_the_size_is_known(monkeypatch, grow)
    outcome = run_command("report head.json")
    assert outcome.code == 2
    assert "larger than 1 MiB, the limit" in outcome.err


def test_a_file_that_is_truncated_while_it_is_read_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "head.json"
    _change_after_the_size_is_known(monkeypatch, lambda: os.truncate(path, 1000))
    outcome = run_command("report head.json")
    assert outcome.code == 2
    assert outcome.err.startswith("llenergy report: head.json: not a report of pytest --energy-report (")
    assert outcome.err.count("\n") == 1


#: Starts each command with its standard output and error as a caller has left them, in a fresh child.
CHILDREN = """
import json, os, sys
from pytest_llenergy.cli import main
for line, redirect in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if redirect == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        elif redirect == "no reader":
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, 1)
        else:
            os.close(1)
        if redirect == "all closed":
            os.close(2)
        sys.stdout = sys.__stdout__ = None if "closed" in redirect else open(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = None if redirect == "all closed" else open(2, "w", closefd=False)
        sys.exit(main(line.split()))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([line, redirect, status, open("err").read()]), flush=True)
"""

#: Exit codes by what standard output is.
STREAMS = {"closed": (0, 1, 5), "all closed": (0, 1, 5), "full": (2,), "no reader": (141,)}


def test_standard_output_that_cannot_be_written_is_one_line(project: Path) -> None:
    lines = [line for _, line in READERS if not line.startswith("merge")]
    cases = [(line, stream) for line in lines for stream in STREAMS]
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, json.dumps(cases)], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    for line, stream, status, err in found:
        assert status in STREAMS[stream], (line, stream, status, err)
        assert "Traceback" not in err, (line, stream, err)
        if stream == "full":
            last = f"llenergy {line.split()[0]}: could not write the output (No space left on device)\n"
            assert err.endswith(last), (line, err)


def test_a_directory_that_is_gone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for line in ("list", "report x", "compare a b", "ab -- pytest x"):
        assert run_command(line).err == (
            f"llenergy {line.split()[0]}: the current directory no longer exists; change to another\n"
        )
