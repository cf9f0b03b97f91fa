# SPDX-License-Identifier: Apache-2.0
"""The marks, each a function: its signature is what ``--markers`` shows and what is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy.errors import LLEnergyError, PlanError

if TYPE_CHECKING:
    # What the marks become is imported when one is read: registering them is all that most runs need.
    from pytest_llenergy.backends.demand import Demand
    from pytest_llenergy.compare.gate import Gate
    from pytest_llenergy.devices.request import GpuRequest
    from pytest_llenergy.model.record import Parallel


def gpus(
    n: int = 1,
    *,
    name: str | None = None,
    memory: str | None = None,
    mig: str | None = None,
    fallback: str | None = None,
) -> GpuRequest:
    """lease n GPUs for the test; it is skipped with the reason where there are fewer. name is a part of \
the product name, memory the least total of each such as "40 GB", mig a profile such as "1g.10gb", which \
asks for MIG instances; fallback="cpu" runs n CPU ranks instead, and the record says so."""
    from pytest_llenergy.devices.request import GpuRequest

    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise PlanError(f"n is {n!r}, needs a whole number, 1 or more")
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise PlanError(f'name is {name!r}, needs a part of the product name, such as "H200"')
    if fallback not in (None, "cpu"):
        raise PlanError(f'fallback is {fallback!r}, knows only "cpu"')
    return GpuRequest(n, name, fallback, memory, mig)


def parallel(*, data: int = 1, tensor: int = 1, pipeline: int = 1, placement: int = 1) -> Parallel:
    """degrees of parallelism; they multiply to the number of devices. placement is the number of \
devices that the layers of one model are spread over in one process, where they work in turn."""
    from pytest_llenergy.model.record import Parallel

    degrees = {"data": data, "tensor": tensor, "pipeline": pipeline, "placement": placement}
    for kind, degree in degrees.items():
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise PlanError(f"{kind} is {degree!r}, needs a whole number, 1 or more")
    return Parallel(**degrees)


def energy_gate(
    *, metric: str | None = None, budget: str | None = None, threshold: str | None = None
) -> Gate:
    """fail the test when a metric exceeds its budget, such as budget="5 J" or \
metric="energy_per_output_token_j", budget="300 mJ", or when it is worse than in the baseline of \
--energy-compare by a threshold, such as threshold="3%" or threshold="3%+2J"."""
    from pytest_llenergy.compare.budget import parse_budget
    from pytest_llenergy.compare.gate import Gate, read_threshold

    if budget is None and threshold is None:
        raise PlanError('needs a budget, such as budget="5 J", a threshold, such as threshold="3%", or both')
    return Gate(
        parse_budget(metric, budget) if budget is not None else None,
        read_threshold(metric, threshold) if threshold is not None else None,
    )


def backend_options(**load_options: Any) -> dict[str, Any]:
    """load options of the backend fixture's engine, such as dtype="float32"; engines that do not take \
them are skipped with the reason."""
    if not load_options:
        raise PlanError('names no load option; write one, such as dtype="float32", or leave the mark out')
    return load_options


def backend_needs(
    *,
    task: str | None = None,
    cache: str | None = None,
    batching: str | None = None,
    timestamps: str | None = None,
) -> Demand:
    """run the test with engines only whose capability row has this: a task, a kind of key-value cache, \
batching="static" or "continuous", timestamps="step" or "token"; the others are skipped with the reason."""
    from typing import get_args, get_type_hints

    from pytest_llenergy.backends.capabilities import Capabilities
    from pytest_llenergy.backends.demand import Demand
    from pytest_llenergy.backends.generation import GenerationParams
    from pytest_llenergy.backends.tasks import TASKS

    row = get_type_hints(Capabilities)
    known: dict[str, tuple[str, ...]] = {
        "task": tuple(TASKS),
        "cache": get_args(get_type_hints(GenerationParams)["cache"]),
        "batching": get_args(get_args(row["batching"])[0]),
        "timestamps": tuple(word for word in get_args(row["timestamps"]) if word != "none"),
    }
    asked = {"task": task, "cache": cache, "batching": batching, "timestamps": timestamps}
    for name, value in asked.items():
        if value is not None and value not in known[name]:
            raise PlanError(f"{name} is {value!r}, knows: {', '.join(known[name])}")
    if all(value is None for value in asked.values()):
        raise PlanError('asks for nothing; name what the test needs, such as timestamps="token"')
    return Demand(task=task, cache=cache, batching=batching, timestamps=timestamps)


MARKS: tuple[Callable[..., Any], ...] = (gpus, parallel, backend_options, backend_needs, energy_gate)
NAMES = frozenset(mark.__name__ for mark in MARKS)


def marker_lines() -> Iterator[str]:
    """Lines for the ini key ``markers``: name, parameters and what it does."""
    for mark in MARKS:
        signature = inspect.signature(mark)
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        taken = signature.replace(parameters=bare, return_annotation=signature.empty)
        yield f"{mark.__name__}{taken}: {mark.__doc__}"


def has(item: pytest.Item, mark: Callable[..., Any]) -> bool:
    """Whether a test has a mark of a kind."""
    return item.get_closest_marker(mark.__name__) is not None


def read(item: pytest.Item, mark: Callable[..., Any]) -> Any:
    """The closest mark of a kind as its data; ``None`` without one. Raises ``PlanError``."""
    return next(_each_level(item, mark), None)


def parse(found: pytest.Mark, mark: Callable[..., Any]) -> Any:
    """A mark's arguments as its data. Raises ``PlanError`` that names what is wrong."""
    try:
        inspect.signature(mark).bind(*found.args, **found.kwargs)
        return mark(*found.args, **found.kwargs)
    except (TypeError, LLEnergyError) as error:
        known = ", ".join(map(_taken, inspect.signature(mark).parameters.values()))
        raise PlanError(f"@pytest.mark.{mark.__name__}: {error} (it takes: {known})") from None


def _taken(parameter: inspect.Parameter) -> str:
    """A parameter as it is given. What takes keywords of any name has none of its own."""
    any_name = parameter.kind is inspect.Parameter.VAR_KEYWORD
    return 'keyword arguments, such as dtype="float32"' if any_name else parameter.name


def check_all(item: pytest.Item) -> None:
    """Parse every mark of ours that a test has, those that others overrule too. Raises ``PlanError``."""
    for mark in MARKS:
        for _ in _each_level(item, mark):
            pass


def _each_level(item: pytest.Item, mark: Callable[..., Any]) -> Iterator[Any]:
    """What the marks of a kind say on each level that has one, the closest first."""
    # Most runs have no test that gets here.
    from pytest_llenergy.levels import levels

    for level in levels(item):
        found = [each for each in level if each.name == mark.__name__]
        if found:
            yield _agreed(found, mark)


def _agreed(found: list[pytest.Mark], mark: Callable[..., Any]) -> Any:
    """What all marks of one level say. Which of several counts would be chance."""
    first = parse(found[0], mark)
    for other in found[1:]:
        if parse(other, mark) != first:
            raise PlanError(f"{_show(other)} and {_show(found[0])} stand in one place; keep one of them")
    return first


def _show(mark: pytest.Mark) -> str:
    """As it is written."""
    given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"@pytest.mark.{mark.name}({', '.join(given)})"
