# SPDX-License-Identifier: Apache-2.0
"""Try a page: its blocks in order, then its tests in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import shell
from .commands import try_command
from .config import READERS, try_config
from .notes import EXIT
from .pages import Block, blocks
from .python import options_of, run_tests, try_python


def find_failures(page: Path, pytester: pytest.Pytester) -> list[str]:
    """Return what is wrong with the blocks of a page, each with its place."""
    failures: list[str] = []
    tests: dict[tuple[str, ...], list[Path]] = {}
    for block in blocks(page):
        with collecting(str(block), failures):
            path = try_block(block, pytester)
            if path is not None:
                tests.setdefault(options_of(block), []).append(path)
    for options, paths in tests.items():
        with collecting(f"tests {' '.join(options)}", failures):
            run_tests(pytester, options, paths)
    return failures


@contextmanager
def collecting(what: str, failures: list[str]) -> Iterator[None]:
    """Add an error to the failures, so that the other blocks are tried as well."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failures.append(f"{what}: {type(error).__name__}: {error}")


def try_block(block: Block, pytester: pytest.Pytester) -> Path | None:
    """Try one block, after those above it. Return its file if it holds tests to run."""
    for note in block.lines("file"):
        write(pytester.path / note.text, note.lines)
    if appended := block.said("append"):
        path = pytester.path / appended
        write(path, path.read_text() + block.code)
        compile(path.read_text(), path, "exec")
        return None
    if block.language == "python":
        return try_python(block, pytester)
    if block.said("file"):
        write(pytester.path / str(block.said("file")), block.code)
    if block.said("not run") is not None:
        return None
    if block.language in READERS:
        for text in try_config(block, pytester):
            check(text, pytester)
    elif block.language != "text":
        expected = block.said("run")
        if expected is None:
            check(block.commands, pytester)
        else:
            run(block.commands, expected, pytester)
    return None


def check(text: str, pytester: pytest.Pytester) -> None:
    """Check each command of a shell text without running it."""
    found = shell.commands(text, pytester.path)
    assert found, "no command in it"
    for words in found:
        try_command(words, pytester)


def run(text: str, expected: str, pytester: pytest.Pytester) -> None:
    """Run a shell text, and check the commands that do not really run."""
    done, rest = shell.run(text, pytester.path)
    end = EXIT.fullmatch(expected)
    code = int(end[1]) if end else 0
    assert done.returncode == code, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    for words in rest:
        try_command(words, pytester)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if text.startswith("#!"):
        path.chmod(0o755)
