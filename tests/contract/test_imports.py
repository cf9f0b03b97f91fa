# SPDX-License-Identifier: Apache-2.0
"""These tests import nothing of the package but its public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(HERE.glob("*.py"))

#: Folders of other tests that import no internals, which the tests below hold.
SHARED = ROOT / "tests" / "nvml_sim"


def imported(path: Path) -> Iterator[str]:
    """Yield the full names of all that a file imports, at any depth."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{name.name}" for name in node.names)


def sources(path: Path) -> Iterator[str]:
    """Yield the texts in a file that are programs of users."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield node.value


def test_only_public_names_are_imported() -> None:
    for path in FILES:
        for name in imported(path):
            if name.startswith("pytest_llenergy"):
                assert name.startswith("pytest_llenergy.api"), f"{path.name}: {name}"
            if name.startswith("tests."):
                assert name.startswith(("tests.contract.", "tests.nvml_sim.")), f"{path.name}: {name}"
    for path in SHARED.glob("*.py"):
        if not path.name.startswith("test_"):
            assert [name for name in imported(path) if name.startswith("pytest_llenergy")] == []


def test_programs_of_users_import_only_public_names() -> None:
    for path in FILES:
        for text in sources(path):
            for line in text.splitlines():
                if line.strip().startswith(("import pytest_llenergy", "from pytest_llenergy")):
                    public = ("from pytest_llenergy.api import", "from pytest_llenergy import slo")
                    assert line.strip().startswith(public), f"{path.name}: {line}"
