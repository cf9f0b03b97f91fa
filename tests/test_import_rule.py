# SPDX-License-Identifier: Apache-2.0
"""Rooms import only what docs/architecture.md allows: measuring on one side, reading on the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest_llenergy

PACKAGE = Path(pytest_llenergy.__file__).parent

FLOOR = {"errors", "lifetime", "real_time", "scratch"}
RECORD = FLOOR | {"record"}
MEASURING = ["backends", "devices", "energy", "ranks", "measure", "hosts"]
READING = ["compare", "report"]
#: What each room may import besides itself. ``record`` is the wall: neither side of it knows the other.
ALLOWED = {
    **{room: set[str]() for room in FLOOR},
    "record": FLOOR,
    "devices": RECORD,
    "backends": RECORD,
    "energy": RECORD | {"devices", "backends"},
    "ranks": RECORD | {"devices", "backends", "energy"},
    "measure": RECORD | {"devices", "backends", "energy", "ranks"},
    "hosts": RECORD | {"devices", "backends", "energy", "ranks", "measure"},
    "compare": RECORD,
    "report": RECORD | {"compare"},
    "ab": RECORD | {"compare", "report"},
    "options": RECORD | {"compare", "report"},
    "cli": {*RECORD, *MEASURING, *READING, "ab", "options"},
    "plugin": {*RECORD, *MEASURING, *READING, "options", "cli", "hookspecs"},
    "hookspecs": RECORD,
    "api": RECORD | {"plugin"},
    "conformance": {*RECORD, *MEASURING, "plugin", "api"},
}
#: Rooms that may import pytest.
WITH_PYTEST = {"plugin", "hookspecs", "conformance"}
#: What only the file whose job it is imports, inside the function that needs it.
HEAVY = {
    "torch",
    "transformers",
    "pynvml",
    "numpy",
    "openvino",
    "openvino_genai",
    "onnxruntime",
    "onnx_ir",
    "onnxruntime_genai",
    "xllamacpp",
    "tokenizers",
    "gguf",
    "vllm",
    "ray",
    "aiohttp",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    return {module_name(path): ast.parse(path.read_text()) for path in files}


def room_of(module: str) -> str:
    return module.split(".")[1]


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every import statement, inside functions too, but those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from statements(node)


def names(statement: ast.stmt) -> Iterator[str]:
    assert not (isinstance(statement, ast.ImportFrom) and statement.level), "a relative import"
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module:
        for alias in statement.names:
            inner = f"{statement.module}.{alias.name}"
            yield inner if inner in modules() else statement.module


def imported(tree: ast.AST) -> set[str]:
    return {name for statement in statements(tree) for name in names(statement)}


def test_a_room_imports_only_what_it_may() -> None:
    found = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for name in sorted(imported(tree))
        if name in modules() and room_of(name) not in ALLOWED[room_of(module)] | {room_of(module)}
    ]
    assert not found, "\n".join(found)


def test_no_room_imports_itself_through_others() -> None:
    TopologicalSorter(ALLOWED).prepare()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imported(tree) & modules().keys() - {module} for module, tree in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_nothing_heavy_is_imported_at_module_level() -> None:
    found = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for statement in tree.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in names(statement)
        if name.partition(".")[0] in HEAVY
    ]
    assert not found, "\n".join(found)


def test_only_the_plugin_imports_pytest() -> None:
    found = [
        module
        for module, tree in modules().items()
        if room_of(module) not in WITH_PYTEST
        and "pytest" in {name.partition(".")[0] for name in imported(tree)}
    ]
    assert not found, "\n".join(found)
