# SPDX-License-Identifier: Apache-2.0
"""Studies of LLenergyMeasure, converted by ``llenergy import``.

``llenergymeasure/`` holds its eight example files, an example of its first layout, and two files of version
0.9, under its licence.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cli import main

STUDIES = Path(__file__).with_name("llenergymeasure")

REPOSITORY = Path(__file__).parents[2]


def convert(file: Path, output: Path, *options: str) -> int:
    return main(["import", str(file), "-o", str(output), *options])


def cases_of(source: str) -> list[tuple[Any, ...]]:
    """Return the values of each case of a test file."""
    (assigned,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    ]
    assert isinstance(assigned, ast.List)
    rows = [each.args if isinstance(each, ast.Call) else getattr(each, "elts", []) for each in assigned.elts]
    return [tuple(ast.literal_eval(part) for part in row) for row in rows]


def convert_text(
    text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the cases of a study, and what is printed about it."""
    (directory / "s.yaml").write_text(text)
    assert convert(directory / "s.yaml", directory) == 0
    printed = capsys.readouterr().err.splitlines()
    return cases_of((directory / "test_s.py").read_text()), [line.partition(".yaml: ")[2] for line in printed]
