# SPDX-License-Identifier: Apache-2.0
"""The marks, each a function: ``--markers`` shows its docstring, and its signature checks the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    # Most runs only register the marks, so parsing a mark imports the type that it returns.
    from pytest_llenergy.backends.registry import Requirements
    from pytest_llenergy.compare.gate import Gate
    from pytest_llenergy.devices.request import GpuRequest
    from pytest_llenergy.record.record import Parallel


def gpus(
    n: int = 1,
    *,
    name: str | None = None,
    memory: str | None = None,
    fallback: str | None = None,
    per_host: int | None = None,
    isolate: bool | None = None,
) -> GpuRequest:
    """gpus(n=1, *, name=None, memory=None, fallback=None, per_host=None, isolate=None): lease n GPUs \
for the test, which is skipped with the reason if there are fewer. name is part of the product name, \
memory the least total memory of each GPU such as "40 GB"; fallback="cpu" runs n CPU ranks instead, which \
the record states. A test on GPUs without energy and ranks runs in a process of its own that sees these \
GPUs; isolate=False runs it in pytest's process, and isolate=True in its own also after the fallback. With \
--energy-cluster the GPUs may be on several hosts: per_host on each, by default in equal shares on as few \
hosts as have them."""
    from pytest_llenergy.devices.request import GpuRequest

    return GpuRequest(n, name, fallback, memory, per_host, isolate)


def gpu_settings(
    *, power_limit_w: float | str | None = None, graphics_clock_mhz: int | tuple[int, int] | str | None = None
) -> dict[str, Any]:
    """gpu_settings(*, power_limit_w=None, graphics_clock_mhz=None): change the leased GPUs for the test \
and put them back afterwards, which needs root; without the rights the test is skipped with the reason. \
graphics_clock_mhz is one clock, or the lowest and the highest. A text names a parameter of the test, for \
sweeps: gpu_settings(power_limit_w="watts"); None leaves the setting alone."""
    from pytest_llenergy.devices.board_settings import parse_settings
    from pytest_llenergy.errors import PlanError

    given = {"power_limit_w": power_limit_w, "graphics_clock_mhz": graphics_clock_mhz}
    if all(each is None for each in given.values()):
        raise PlanError("names no setting; add one, such as power_limit_w=250, or remove the mark")
    parse_settings({name: each for name, each in given.items() if not isinstance(each, str)})
    return given


def parallel(*, data: int = 1, tensor: int = 1, pipeline: int = 1, placement: int = 1) -> Parallel:
    """parallel(*, data=1, tensor=1, pipeline=1, placement=1): degrees of parallelism; they multiply to the \
number of devices. placement is the number of devices over which one process \
spreads the layers of a model; they work in turn."""
    from pytest_llenergy.options.values import whole_number
    from pytest_llenergy.record.record import Parallel

    degrees = {"data": data, "tensor": tensor, "pipeline": pipeline, "placement": placement}
    return Parallel(**{kind: whole_number(kind, degree, 1) for kind, degree in degrees.items()})


def energy_options(
    *,
    rounds: int | None = None,
    warmup: int | str | None = None,
    target: float | str | None = None,
    budget: float | None = None,
    iterations: int | None = None,
) -> dict[str, Any]:
    """energy_options(*, rounds=None, warmup=None, target=None, budget=None, iterations=None): \
how energy(...) measures the test. rounds, warmup, target and budget override --energy-rounds, \
--energy-warmup, --energy-target and --energy-budget; iterations fixes the calls per round. A setting \
that the mark leaves out comes from the class, then the module, then the option."""
    from pytest_llenergy.plugin.rounds import parse_round_options

    return parse_round_options(rounds, warmup, target, budget, iterations)


def energy_gate(
    *, metric: str | None = None, budget: str | None = None, threshold: str | None = None
) -> Gate:
    """energy_gate(*, metric=None, budget=None, threshold=None): fail the test when a metric exceeds its \
budget, such as budget="5 J" or metric="energy_per_output_token_j", budget="300 mJ", or when it is \
worse than in the baseline of --energy-compare by a threshold, such as threshold="3%" or \
threshold="3%+2J"."""
    from pytest_llenergy.compare.gate import parse_gate

    return parse_gate(metric, budget, threshold)


def backend_options(**load_options: Any) -> dict[str, Any]:
    """backend_options(**load_options): load options for the backend fixture, such as \
dtype="float32"; backends that do not take them are skipped with the reason."""
    from pytest_llenergy.errors import PlanError

    if not load_options:
        raise PlanError('names no load option; add one, such as dtype="float32", or remove the mark')
    return load_options


def backend_needs(
    *,
    task: str | None = None,
    cache: str | None = None,
    timestamps: str | None = None,
) -> Requirements:
    """backend_needs(*, task=None, cache=None, timestamps=None): run the test only with backends whose \
capability row has this: a task, a kind of key-value cache, timestamps="step" or "token"; the others are \
skipped with the reason."""
    from pytest_llenergy.backends.registry import parse_needs

    return parse_needs(task=task, cache=cache, timestamps=timestamps)


MARKS: tuple[Callable[..., Any], ...] = (
    gpus,
    gpu_settings,
    parallel,
    energy_options,
    backend_options,
    backend_needs,
    energy_gate,
)
NAMES = frozenset(mark.__name__ for mark in MARKS)


def has_energy_marks(node: pytest.Item) -> bool:
    """Whether a test, or a class or module that contains it, has one of these marks."""
    return any(mark.name in NAMES for mark in node.iter_markers())
