# SPDX-License-Identifier: Apache-2.0
"""Blocks of Python: test files, scripts, and modules for other blocks."""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from .pages import Block
from .project import QUICK

#: Added to every test file of a page.
IMPORTS = "import pytest\n"


def try_python(block: Block, pytester: pytest.Pytester) -> Path | None:
    """Write a block, and run it if it is a script. Return the file if its tests should run.

    Raises ``AssertionError`` with the output.
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
    """Say whether pytest would find tests in a module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        (isinstance(node, functions) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in tree.body
    )


def options_of(block: Block) -> tuple[str, ...]:
    """Return the further options for the tests of a block."""
    return tuple(shlex.split(" ".join(note.text for note in block.notes if note.name == "with")))


def collect(pytester: pytest.Pytester, path: Path) -> None:
    """Check that there are tests with valid marks and parameters."""
    result = pytester.runpytest_inprocess(path, *shlex.split(QUICK), "--collect-only", "-q")
    assert result.ret == 0, output_of(result)


def run_tests(pytester: pytest.Pytester, options: Sequence[str], paths: Sequence[Path]) -> None:
    """Check that all tests pass, in one run, which shares what it loads."""
    quick = shlex.split(QUICK)
    if any(option.startswith("--energy-backend=") for option in options):
        # Repeated, the option adds backends.
        quick = [option for option in quick if not option.startswith("--energy-backend=")]
    result = pytester.runpytest_inprocess(*paths, *quick, *options)
    outcomes = Counter(result.parseoutcomes())
    for harmless in ("passed", "deselected", "warning", "warnings"):
        del outcomes[harmless]
    assert result.ret == 0, output_of(result)
    assert not outcomes, output_of(result)


def run_script(pytester: pytest.Pytester, path: Path) -> None:
    """Check that a script succeeds."""
    result = pytester.runpython(path)
    assert result.ret == 0, output_of(result)


def output_of(result: pytest.RunResult) -> str:
    """Return the output of a run."""
    return f"exit code {result.ret}\n{result.stdout.str()}\n{result.stderr.str()}"
