# SPDX-License-Identifier: Apache-2.0
"""A page is tried: its blocks in their order, then its tests in one run."""

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


def failures_of(page: Path, pytester: pytest.Pytester) -> list[str]:
    """What is wrong with the blocks of a page, each with its place."""
    failures: list[str] = []
    tests: dict[tuple[str, ...], list[Path]] = {}
    for block in blocks(page):
        with failing(str(block), failures):
            path = try_block(block, pytester)
            if path is not None:
                tests.setdefault(options_of(block), []).append(path)
    for options, paths in tests.items():
        with failing(f"tests {' '.join(options)}", failures):
            run_tests(pytester, options, paths)
    return failures


@contextmanager
def failing(what: str, failures: list[str]) -> Iterator[None]:
    """Add what goes wrong to the failures: the others are looked at as well."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failures.append(f"{what}: {type(error).__name__}: {error}")


def try_block(block: Block, pytester: pytest.Pytester) -> Path | None:
    """One block, after what stands above it on its page. Gives the file of tests that are to be run."""
    for note in block.lines("file"):
        written(pytester.path / note.text, note.lines)
    if block.language == "python":
        return try_python(block, pytester)
    if block.said("file"):
        written(pytester.path / str(block.said("file")), block.code)
    if block.said("not run") is not None:
        return None
    if block.language in READERS:
        for text in try_config(block, pytester):
            look(text, pytester)
    elif block.language != "text":
        text = shell.session(block.code) if block.language == "console" else block.code
        asked = block.said("run")
        if asked is None:
            look(text, pytester)
        else:
            run(text, asked, pytester)
    return None


def look(text: str, pytester: pytest.Pytester) -> None:
    """Look at each command in a text for a shell."""
    found = shell.commands(text, pytester.path)
    assert found, "no command in it"
    for words in found:
        try_command(words, pytester)


def run(text: str, asked: str, pytester: pytest.Pytester) -> None:
    """Run it, and look at those commands that are not run."""
    done, rest = shell.run(text, pytester.path)
    end = EXIT.fullmatch(asked)
    expected = int(end[1]) if end else 0
    assert done.returncode == expected, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    for words in rest:
        try_command(words, pytester)


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if text.startswith("#!"):
        path.chmod(0o755)
