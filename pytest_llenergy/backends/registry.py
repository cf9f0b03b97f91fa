# SPDX-License-Identifier: Apache-2.0
"""Every backend that can be named: built in, from entry points, from hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pytest_llenergy.backends import openvino
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.llama_cpp import spec as llama_cpp
from pytest_llenergy.backends.onnxruntime import spec as onnxruntime
from pytest_llenergy.backends.server import spec as server
from pytest_llenergy.backends.sglang import spec as sglang
from pytest_llenergy.backends.tensorrt_llm import spec as tensorrt_llm
from pytest_llenergy.backends.transformers import spec as transformers
from pytest_llenergy.backends.vllm import spec as vllm
from pytest_llenergy.errors import BackendError

BUILTIN = (
    *(transformers.SPEC, openvino.SPEC, onnxruntime.SPEC, llama_cpp.SPEC),
    *(vllm.SPEC, sglang.SPEC, tensorrt_llm.SPEC, server.SPEC),
)
ENTRY_POINTS = "pytest_llenergy.backends"


@dataclass(frozen=True)
class Broken:
    """An entry point that gives no backend: its name, and in a line why, and what to do."""

    name: str
    reason: str


def found_backends() -> tuple[dict[str, BackendSpec], tuple[Broken, ...]]:
    """The built-in backends and those of entry points by name, in a fixed order; then what is broken."""
    specs = {spec.name: spec for spec in BUILTIN}
    broken = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        found = _loaded(point)
        if isinstance(found, Broken):
            broken.append(found)
        else:
            specs[found.name] = found
    return specs, tuple(broken)


def known_backends(extra: Sequence[BackendSpec] = ()) -> dict[str, BackendSpec]:
    """By name, in a fixed order: built-in ones, entry points, then ``extra``.

    Raises ``BackendError`` when an entry point does not give a ``BackendSpec``.
    """
    specs, broken = found_backends()
    if broken:
        raise BackendError("; ".join(each.reason for each in broken))
    specs.update((spec.name, spec) for spec in extra)
    return specs


def _loaded(point: EntryPoint) -> BackendSpec | Broken:
    try:
        spec = point.load()
    except Exception as error:
        # The module is somebody else's, and may fail with anything.
        said = str(error).strip().partition("\n")[0]
        wrong = f"cannot be loaded ({type(error).__name__}{': ' if said else ''}{said})"
    else:
        if isinstance(spec, BackendSpec):
            return spec
        wrong = f"gives a {type(spec).__name__}, not a BackendSpec"
    package = "its package" if point.dist is None else point.dist.name
    return Broken(
        point.name,
        f"entry point {point.name} = {point.value} of {ENTRY_POINTS} {wrong}; mend or uninstall {package}",
    )


def select(names: Sequence[str], specs: Mapping[str, BackendSpec]) -> list[BackendSpec]:
    """The named backends, or all that can run here; where none can, all that need not be told anything.

    Raises ``BackendError`` for an unknown name.
    """
    for name in names:
        if name not in specs:
            raise BackendError(f"unknown backend {name!r}; known: {', '.join(specs)}")
    if names:
        return [specs[name] for name in names]
    found = [spec for spec in specs.values() if spec.missing() is None]
    return found or [spec for spec in specs.values() if spec.needs is None]
