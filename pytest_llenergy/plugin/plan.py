# SPDX-License-Identifier: Apache-2.0
"""TestPlan: the requirements of one test, parsed once from its marks and parameters and kept on the test.

If a test has several marks of a kind, the closest counts: a parameter's, then its function's, its class's,
its module's. For ``energy_options`` this holds for each of its settings. ``get_closest_marker`` cannot be
used: pytest puts a function's marks before those of its parameter, and those of a base class before those of
the derived class.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Parameter, getsource, signature, unwrap
from reprlib import Repr
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.backends.registry import Requirements
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.plugin import marks
from pytest_llenergy.plugin.stash import BACKEND_PARAMETER, ENERGY, RANK_FIXTURES
from pytest_llenergy.record.record import Parallel

if TYPE_CHECKING:
    from pytest_llenergy.compare.gate import Gate
    from pytest_llenergy.devices.request import GpuRequest
    from pytest_llenergy.record.base import Primitive

#: Most characters of a parameter in a record.
PARAM_LENGTH = 200


@dataclass(frozen=True)
class TestPlan:
    """The requirements of one test; a field is ``None`` if the test lacks the mark.

    Attributes:
        gpus: Devices to lease.
        gpu_settings: Power limit and clocks of these devices; a text names a parameter of the test.
        parallel: Degrees of parallelism.
        energy_options: Fields of the test's ``RoundPlan`` that differ from the options of the run.
        backend_options: Load options of the backend.
        backend_needs: Required capabilities of the backend.
        gate: Limits for the test's metrics.
        backend: Name of the backend that runs the test, from its parameter.
    """

    __test__ = False  # pytest would collect a class of this name

    gpus: GpuRequest | None = None
    gpu_settings: Mapping[str, Any] | None = None
    parallel: Parallel | None = None
    energy_options: Mapping[str, Any] | None = None
    backend_options: Mapping[str, Any] | None = None
    backend_needs: Requirements | None = None
    gate: Gate | None = None
    backend: str | None = None

    @property
    def device_count(self) -> int:
        """Number of devices that the test leases: one, the CPU, without a ``gpus`` mark."""
        return self.gpus.n if self.gpus is not None else 1

    @property
    def degrees(self) -> Parallel:
        """Degrees of the ``parallel`` mark; all 1 without it."""
        return self.parallel or Parallel()

    @property
    def requirements(self) -> Requirements:
        """Requirements on the test's backend."""
        return replace(
            self.backend_needs or Requirements(),
            parallel=self.parallel,
            devices=self.device_count,
            options=self.backend_options or {},
            per_host=self.gpus.per_host if self.gpus is not None else None,
        )


#: The plan of a test.
PLAN = pytest.StashKey[TestPlan]()


def freeze_plan(item: pytest.Item) -> TestPlan:
    """Parse the marks that a test has at the end of its collection; later ones have no effect.

    Raises:
        PlanError: A mark has invalid arguments, or two marks in one place disagree.
    """
    plan = item.stash[PLAN] = parse_plan(item)
    return plan


def plan_of(item: pytest.Item) -> TestPlan:
    """Return the plan of a test. Raises like ``freeze_plan`` for a test that was added after collection."""
    found = item.stash.get(PLAN, None)
    return freeze_plan(item) if found is None else found


def valid_plan_of(item: pytest.Item) -> TestPlan | None:
    """Return the plan of a test by its marks so far, or None if one is invalid."""
    try:
        return parse_plan(item)
    except LLEnergyError:
        return None


def parse_plan(item: pytest.Item) -> TestPlan:
    """Parse all of this plugin's marks on a test, including overridden ones.

    Raises:
        PlanError: If a mark has invalid arguments, or two marks in one place disagree.
    """
    levels = list(mark_levels(item))
    found = {mark.__name__: _parse_levels(levels, mark) for mark in marks.MARKS}
    values = {name: parsed[0] if parsed else None for name, parsed in found.items()}
    if options := found[marks.energy_options.__name__]:
        values[marks.energy_options.__name__] = dict(ChainMap(*options))
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get(BACKEND_PARAMETER) if callspec is not None else None
    backend = name if isinstance(name, str) else None
    return TestPlan(gate=values.pop(marks.energy_gate.__name__), backend=backend, **values)


def mark_levels(item: pytest.Item) -> Iterator[list[pytest.Mark]]:
    """Yield the marks of each level at which a test has any, the closest level first.

    Marks that ``add_marker`` added to a node follow those in the node's source or, with ``append=False``,
    precede them.
    """
    for node in reversed(item.listchain()):
        written = _marks_in_source(node)
        places = {id(mark): place for place, level in enumerate(written) for mark in level}
        by_place: dict[int, list[pytest.Mark]] = {}
        added = -1
        for mark in node.own_markers:
            by_place.setdefault(places.get(id(mark), added), []).append(mark)
            if id(mark) in places:
                added = len(written)
        yield from (by_place[place] for place in sorted(by_place))


def runs_in_ranks(plan: TestPlan, fixtures: Collection[str]) -> bool:
    """Whether the work of a test with these fixtures runs in ranks, among which ``parallel`` divides it.

    With a ``gpus`` mark, ``energy(fn)`` runs ``fn`` in ranks.
    """
    return any(name in fixtures for name in RANK_FIXTURES) or (plan.gpus is not None and ENERGY in fixtures)


def record_params(item: pytest.Item) -> dict[str, Primitive]:
    """Return the parameters of a test for its record: primitives, or a short text."""
    callspec = getattr(item, "callspec", None)
    values: Mapping[str, Any] = callspec.params if callspec is not None else {}
    return {name.removeprefix("_llenergy_"): _primitive(value) for name, value in values.items()}


def source_digest(item: pytest.Item) -> str | None:
    """Hash the code of a test's function without its name, marks, annotations, comments and formatting.

    Parameters are recorded apart. Returns None if there is no source code.
    """
    function = getattr(item, "function", None)
    return _source_digest(unwrap(function)) if function is not None else None


@lru_cache(maxsize=64)
def _source_digest(function: Callable[..., object]) -> str | None:
    try:
        (node,) = ast.parse(dedent(getsource(function))).body
    # A name typed into an interpreter, generated code, a lambda within a call.
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    docstring = ast.get_docstring(node, clean=False) is not None
    decorators = [each for each in node.decorator_list if not _is_mark(each)]
    code = [_code_of(each) for each in (node.args, *node.body[docstring:], *decorators)]
    # What makes one function of a factory differ from another.
    code += [each for each in _closure_values(function) if type(each) in (bool, int, float, str)]
    return hashlib.sha256(repr(code).encode(errors="surrogatepass")).hexdigest()[:12]


def _is_mark(decorator: ast.expr) -> bool:
    names = {each.attr for each in ast.walk(decorator) if isinstance(each, ast.Attribute)}
    names |= {each.id for each in ast.walk(decorator) if isinstance(each, ast.Name)}
    return "mark" in names


def _closure_values(function: Callable[..., object]) -> list[object]:
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        # A name that is not bound yet.
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _code_of(node: object) -> object:
    """Return the content of a syntax tree, which is the same in each version of Python."""
    if isinstance(node, list):
        return [_code_of(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    # Versions differ in the fields that are mostly empty.
    parts = [(name, each) for name, each in ast.iter_fields(node) if each not in (None, [])]
    return type(node).__name__, [(name, _code_of(each)) for name, each in parts if name != "annotation"]


class _Bounded(Repr):
    """``repr`` of no more items of a container than the text of a parameter can hold; sets are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 20
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = PARAM_LENGTH
        self.maxdeque = self.maxarray = PARAM_LENGTH
        self.maxstring = self.maxlong = self.maxother = sys.maxsize


_BOUNDED = _Bounded()


def _primitive(value: Any) -> Primitive:
    if value is None or type(value) in (bool, int, float, str):
        return _shorten(value) if isinstance(value, str) else value
    # A repr with an address would make equal parameters differ from run to run.
    text = _BOUNDED.repr(value)
    # The text of a long tensor is the same for each length.
    if isinstance(shape := getattr(value, "shape", None), tuple) and shape:
        text = f"{tuple(shape)} {text}"
    return type(value).__qualname__ if " at 0x" in text else _shorten(text)


def _shorten(text: str) -> str:
    """Cut a long text, and end it with a hash of the whole, so that others of that beginning differ."""
    if len(text) <= PARAM_LENGTH:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{text[: PARAM_LENGTH - 13]}~{digest}"


def _marks_in_source(node: object) -> list[list[pytest.Mark]]:
    """Return the marks in a node's source by level: parameter and function, or class and base classes."""
    if isinstance(node, pytest.Class):
        return [_as_marks(vars(each).get("pytestmark", [])) for each in node.obj.__mro__]
    if not isinstance(node, pytest.Function):
        return []
    callspec = getattr(node, "callspec", None)
    return [_as_marks(callspec.marks if callspec else []), _as_marks(getattr(node.obj, "pytestmark", []))]


def _as_marks(given: object) -> list[pytest.Mark]:
    # ``pytestmark`` holds marks or mark decorators, one or a list.
    several: list[Any] = given if isinstance(given, list) else [given]
    return [getattr(each, "mark", each) for each in several]


def _parse_levels(levels: Sequence[Sequence[pytest.Mark]], mark: Callable[..., Any]) -> list[Any]:
    """Parse the marks of a kind on all levels; return one value per level that has any, the closest first."""
    values = []
    for level in levels:
        of_kind = [each for each in level if each.name == mark.__name__]
        parsed = [_parse(each, mark) for each in of_kind]
        for other, value in zip(of_kind, parsed, strict=True):
            if value != parsed[0]:
                raise PlanError(
                    f"{_format_mark(other)} and {_format_mark(of_kind[0])} are on the same level; remove one"
                )
        values += parsed[:1]
    return values


def _parse(given: pytest.Mark, mark: Callable[..., Any]) -> Any:
    try:
        signature(mark).bind(*given.args, **given.kwargs)
        return mark(*given.args, **given.kwargs)
    except (TypeError, LLEnergyError) as error:
        accepted = ", ".join(map(_describe_parameter, signature(mark).parameters.values()))
        raise PlanError(f"@pytest.mark.{mark.__name__}: {error} (it takes: {accepted})") from None


def _describe_parameter(parameter: Parameter) -> str:
    any_name = parameter.kind is Parameter.VAR_KEYWORD
    return 'keyword arguments, such as dtype="float32"' if any_name else parameter.name


def _format_mark(mark: pytest.Mark) -> str:
    """Return a mark as source code."""
    given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"@pytest.mark.{mark.name}({', '.join(given)})"
