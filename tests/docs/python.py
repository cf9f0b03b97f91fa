# SPDX-License-Identifier: Apache-2.0
"""Blocks of Python: test files under pytest, scripts, and modules that other blocks use."""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from .pages import Block
from .project import QUICK

#: What every test file of a page may use without saying so.
IMPORTS = "import pytest\n"


def try_python(block: Block, pytester: pytest.Pytester) -> Path | None:
    """Write a block, and run it if it is a script. Gives the file if it is one of tests that are to be run.

    Raises ``AssertionError`` with what it printed.
    """
    tree = ast.parse(block.code)
    tests = has_tests(tree)
    hidden = "".join(note.lines for note in block.lines("before"))
    file = block.said("file")
    stem = f"{'test' if tests else 'script'}_line_{block.line}"
    path = pytester.path / (file or f"{stem}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{IMPORTS if tests and not file else ''}{hidden}{block.code}")
    left_out = block.said("not run") is not None
    if tests and left_out:
        collect(pytester, path)
    elif not tests and not left_out and file is None:
        run_script(pytester, path)
    return path if tests and not left_out else None


def has_tests(tree: ast.Module) -> bool:
    """Whether pytest would find tests in it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        (isinstance(node, functions) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in tree.body
    )


def options_of(block: Block) -> tuple[str, ...]:
    """Further options that its tests are run with."""
    return tuple(shlex.split(" ".join(note.text for note in block.notes if note.name == "with")))


def collect(pytester: pytest.Pytester, path: Path) -> None:
    """There are tests, whose marks and parameters are right."""
    result = pytester.runpytest_inprocess(path, *shlex.split(QUICK), "--collect-only", "-q")
    assert result.ret == 0, told(result)


def run_tests(pytester: pytest.Pytester, options: Sequence[str], paths: Sequence[Path]) -> None:
    """All of them pass. They are of one run, which shares what it has loaded."""
    result = pytester.runpytest_inprocess(*paths, *shlex.split(QUICK), *options)
    outcomes = Counter(result.parseoutcomes())
    for harmless in ("passed", "deselected", "warning", "warnings"):
        del outcomes[harmless]
    assert result.ret == 0, told(result)
    assert not outcomes, told(result)


def run_script(pytester: pytest.Pytester, path: Path) -> None:
    """It ends well, and warns of nothing."""
    result = pytester.runpython(path)
    assert result.ret == 0, told(result)


def told(result: pytest.RunResult) -> str:
    """What it has printed."""
    return f"exit code {result.ret}\n{result.stdout.str()}\n{result.stderr.str()}"
