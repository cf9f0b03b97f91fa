# SPDX-License-Identifier: Apache-2.0
"""Write the page of fixtures and the objects that they return, from docstrings and types."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest_llenergy
from pytest_llenergy.api import BackendHandle, Energy, EnergyMeter, Run, Workers
from pytest_llenergy.backends.tasks import (
    Generation,
    GenerationParams,
    Params,
    ServedLoad,
    ServeParams,
)
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy import Measuring, Window, measure

from .text import code, lines_of, page, parameters, prose, split_attributes, table, typed


class Object(NamedTuple):
    """A class and its public members, in order.

    Attributes:
        called: The name of such an object in tests.
        paragraphs: Number of paragraphs of the docstring to show; None shows all.
    """

    kind: type
    members: Sequence[str]
    called: str = ""
    paragraphs: int | None = None


PARAMETERS = (GenerationParams, ServeParams)
OBJECTS = (
    Object(Energy, ("__call__", "pedantic", "metric", "extra_info"), called="energy"),
    Object(Run, ("rounds", "metrics", "result")),
    Object(EnergyMeter, ("__call__", "begin", "end", "metric", "extra_info"), called="energy_meter"),
    Object(
        Window,
        (
            "start_s",
            "duration_s",
            "energy_j",
            "energy_u_j",
            "energy_u_absolute_j",
            "by_domain",
            "flags",
            "reason",
            "ended",
            "settled",
        ),
    ),
    Object(Lease, ("uuids", "indices", "names", "visible_devices", "devices", "fallback"), paragraphs=2),
    Object(Workers, ("world_size", "run", "call")),
    Object(BackendHandle, ("name", "model", "options", "tasks", "with_options", "generate", "serve")),
    Object(Generation, ("texts", "token_ids", "requests", "output_tokens")),
    Object(ServedLoad, ("requests", "output_tokens", "exact", "failures", "cached_tokens")),
    Object(Measuring, ("window", "begin", "end", "total", "windows", "reasons")),
)

INTRODUCTION = """\
What a test requests by name, and the objects that it gets. [Write measured tests](../writing-tests.md) has
examples; `pytest --fixtures` lists the fixtures. `Round`, `Metric`, `DomainEnergy` and `Flag` are [as in the
report](schema.md)."""

METRICS = """\
Every [metric](../numbers.md#metrics) is an attribute of a run; one without a value fails the test with the
reason."""


def fixtures_page() -> str:
    """Return the whole page."""
    return page(
        "# Fixtures",
        INTRODUCTION,
        "## Fixtures",
        *(list(_fixture(each)) for each in fixtures()),
        "## In a plain script",
        f"`pytest_llenergy.energy.measure{parameters(measure)}`",
        prose(measure.__doc__),
        "## Objects",
        *(list(_object(each)) for each in OBJECTS),
        "## Arguments of tasks",
        *(list(_parameters(each)) for each in PARAMETERS),
        "## Metrics",
        METRICS,
    )


def fixtures() -> list[ast.FunctionDef]:
    """Return the fixtures as they are written; the decorator hides the functions."""
    path = Path(pytest_llenergy.__file__).parent / "plugin" / "fixtures.py"
    found = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]
    return [each for each in found if each.decorator_list and not each.name.startswith("_")]


def _fixture(fixture: ast.FunctionDef) -> Iterator[str]:
    returned = ast.unparse(fixture.returns) if fixture.returns else ""
    returned = returned.removeprefix("Iterator[").removesuffix("]")
    yield from lines_of(f"### {fixture.name}", prose(ast.get_docstring(fixture)), f"Returns `{returned}`.")


def _object(each: Object) -> Iterator[str]:
    text, meanings = split_attributes(each.kind.__doc__)
    paragraphs = prose(text).split("\n\n")[: each.paragraphs]
    rows = [_member(each, name, meanings.get(name, "")) for name in each.members]
    yield from lines_of(
        f"### {each.kind.__name__}", "\n\n".join(paragraphs), table(["", "type", "meaning"], rows)
    )


def _member(of: Object, name: str, meaning: str) -> list[str]:
    kind = of.kind
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property):
        returned = inspect.signature(found.fget).return_annotation if found.fget else ""
        return [code(name), code(typed(returned)), prose(found.__doc__, inline=True)]
    if inspect.isfunction(found):
        returned = typed(inspect.signature(found).return_annotation)
        call = parameters(found).replace("(/, ", "(").replace("(self, ", "(")
        name = of.called if name == "__call__" else name
        return [code(f"{name}{call}"), code(returned), prose(found.__doc__, inline=True)]
    return [code(name), code(_annotation(kind, name)), meaning]


def _annotation(kind: type, name: str) -> str:
    """Return the type of an attribute that the class declares, or that ``__init__`` sets."""
    for each in kind.__mro__:
        if name in vars(each).get("__annotations__", {}):
            return typed(vars(each)["__annotations__"][name])
    tree = ast.parse(inspect.getsource(kind))
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == f"self.{name}":
            return ast.unparse(node.annotation)
    raise ValueError(f"{kind.__name__} has no {name}")


def _written(annotation: Any) -> str:
    text = inspect.formatannotation(annotation).replace("typing.", "")
    text = re.sub(r"Optional\[(.*)\]$", r"\1 | None", text)
    return re.sub(r"[a-z_]+\.(?=[\w.]*[A-Z])", "", text)


def _parameters(kind: type[Params]) -> Iterator[str]:
    text, meanings = split_attributes(kind.__doc__)
    defaults = dict(zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True))
    # Without bounds, which are in ``Annotated``.
    types = get_type_hints(kind)
    rows = [
        [code(name), code(_written(types[name])), code(repr(defaults[name])), meanings.get(name, "")]
        for name in vars(kind).get("__annotations__", {})
        if name in defaults
    ]
    inherited = [f"`backend.{base.task}`" for base in kind.__mro__[1:] if base in PARAMETERS]
    more = f"Takes the arguments of {' and '.join(inherited)} too." if inherited else ""
    columns = ["argument", "type", "default", "meaning"]
    yield from lines_of(f"### backend.{kind.task}", prose(text), more, table(columns, rows))
