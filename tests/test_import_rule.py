# SPDX-License-Identifier: Apache-2.0
"""The rooms may only look down: see docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_llenergy

PACKAGE = Path(pytest_llenergy.__file__).parent

#: Lower floors first. A room may import its own floor's modules only within itself.
FLOORS = [
    {"errors"},
    {"model"},
    {"devices", "backends"},
    {"meters"},
    {"measure", "workers"},
    {"compare", "report", "doctor", "forges"},
    {"ab", "export", "history", "peers"},
    {"levels"},
    {"marks", "hookspecs", "process", "options", "errand", "failure"},
    {"marked"},
    {"gating", "progress"},
    {"state", "recorder", "diagnosis"},
    {"handles", "leasing"},
    {"runs"},
    {"fixtures", "integrations", "cli", "conformance"},
    {"start"},
    {"engines"},
    {"collection", "controller"},
    {"hooks"},
    {"ready"},
    {"plugin"},
]
#: Rooms that must work where pytest is not installed.
WITHOUT_PYTEST = {
    "errors",
    "model",
    "meters",
    "devices",
    "backends",
    "measure",
    "workers",
    "compare",
    "report",
    "doctor",
    "forges",
    "ab",
    "export",
    "history",
    "peers",
}
HEAVY = {
    "torch",
    "transformers",
    "pynvml",
    "numpy",
    "fsspec",
    "ruptures",
    "openvino_genai",
    "onnxruntime_genai",
    "xllamacpp",
    "tokenizers",
    "gguf",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "aiohttp",
}


def floor(room: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        # Names that do not say where they begin would be held to nothing here.
        assert not (isinstance(node, ast.ImportFrom) and node.level), "a relative import"
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_the_floors_below(path: Path) -> None:
    own = room_of(path)
    for name in imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "pytest_llenergy" or len(parts) < 2 or parts[1].startswith("_"):
            continue
        assert parts[1] == own or floor(parts[1]) < floor(own), f"{own} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.split(".")[0] for node in top for name in imports(node)}
    assert not names & HEAVY
    if room_of(path) in WITHOUT_PYTEST or room_of(path) == "cli":
        everything = {name.split(".")[0] for name in imports(tree)}
        assert "pytest" not in everything
