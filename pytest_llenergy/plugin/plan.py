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
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Parameter, getsource, signature, unwrap
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
        PlanError: A mark has invalid arguments.
    """
    plan = item.stash[PLAN] = parse_plan(item)
    return plan


def plan_of(item: pytest.Item) -> TestPlan:
    """Return the plan of a test. Raises like ``freeze_plan`` for a test that was added after collection."""
    found = item.stash.get(PLAN, None)
    return freeze_plan(item) if found is None else found


def parse_plan(item: pytest.Item) -> TestPlan:
    """Parse all of this plugin's marks on a test, including overridden ones.

    Raises:
        PlanError: If a mark has invalid arguments.
    """
    values: dict[str, Any] = {}
    for mark in marks.MARKS:
        found = [_parse(each, mark) for each in closest_marks(item, mark.__name__)]
        values[mark.__name__] = found[0] if found else None
        if found and mark is marks.energy_options:
            values[mark.__name__] = dict(ChainMap(*found))
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get(BACKEND_PARAMETER) if callspec is not None else None
    backend = name if isinstance(name, str) else None
    return TestPlan(gate=values.pop(marks.energy_gate.__name__), backend=backend, **values)


def closest_marks(item: pytest.Item, name: str) -> Iterator[pytest.Mark]:
    """Yield the marks of one kind, the closest to the test first."""
    for node in reversed(item.listchain()):
        yield from (mark for mark in reversed(node.own_markers) if mark.name == name)


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
    """Hash the code of a test's function without its name, marks, comments and formatting.

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
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    decorators = [each for each in map(ast.unparse, node.decorator_list) if "mark" not in each]
    names = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
    defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    code = [*names, *map(ast.unparse, [*defaults, *body]), *decorators]
    return hashlib.sha256(repr(code).encode(errors="surrogatepass")).hexdigest()[:12]


def _primitive(value: Any) -> Primitive:
    if value is None or type(value) in (bool, int, float, str):
        return _shorten(value) if isinstance(value, str) else value
    # A repr with an address would make equal parameters differ from run to run.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else _shorten(text)


def _shorten(text: str) -> str:
    """Cut a long text, and end it with a hash of the whole, so that others of that beginning differ."""
    if len(text) <= PARAM_LENGTH:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{text[: PARAM_LENGTH - 13]}~{digest}"


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
