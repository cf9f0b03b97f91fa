# SPDX-License-Identifier: Apache-2.0
"""Modules import only from their own tier and lower ones, without cycles: see docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest_llenergy

PACKAGE = Path(pytest_llenergy.__file__).parent

#: Lower tiers first. Modules of one tier may import each other unless that makes a cycle.
TIERS = [
    {"errors", "lifetime", "scratch"},
    {"model"},
    {"devices", "traffic", "backends"},
    {"meters", "workers"},
    {"measure", "compare", "cluster"},
    {"history"},
    {"report", "doctor", "forges"},
    {"ab", "export"},
    {"stash", "options", "marks", "hookspecs"},
    {
        "plan",
        "xdist",
        "xdist_scheduling",
        "progress",
        "report_builder",
        "interruption",
        "draft",
        "recorder",
        "baseline",
        "gating",
        "gangs",
        "gate_coverage",
        "saving",
        "leasing",
        "session",
        "controller",
    },
    {"api", "fixtures"},
    {"collection", "integrations", "conformance", "cli", "plugin"},
]
#: From this tier on a module may import pytest; ``cli`` never does.
PLUGIN_TIER = 8
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


def tier(part: str) -> int:
    return next(index for index, parts in enumerate(TIERS) if part in parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    return {module_name(path): ast.parse(path.read_text()) for path in files}


def part_of(module: str) -> str:
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


def test_a_module_imports_only_its_own_tier_and_those_below() -> None:
    upward = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for name in sorted(imported(tree))
        if name in modules() and tier(part_of(name)) > tier(part_of(module))
    ]
    assert not upward, "\n".join(upward)


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


def test_only_the_plugin_itself_imports_pytest() -> None:
    found = [
        module
        for module, tree in modules().items()
        if (tier(part_of(module)) < PLUGIN_TIER or part_of(module) == "cli")
        and "pytest" in {name.partition(".")[0] for name in imported(tree)}
    ]
    assert not found, "\n".join(found)
