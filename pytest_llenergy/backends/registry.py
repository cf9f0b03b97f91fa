# SPDX-License-Identifier: Apache-2.0
"""Every backend that can be named: built in, from entry points, from hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from pytest_llenergy.model.installed import Broken, installed

BUILTIN = (
    *(transformers.SPEC, openvino.SPEC, onnxruntime.SPEC, llama_cpp.SPEC),
    *(vllm.SPEC, sglang.SPEC, tensorrt_llm.SPEC, server.SPEC),
)
ENTRY_POINTS = "pytest_llenergy.backends"


def found_backends() -> tuple[dict[str, BackendSpec], tuple[Broken, ...]]:
    """The built-in backends and those of entry points by name, in a fixed order; then what is broken."""
    others = installed(ENTRY_POINTS, BackendSpec)
    specs = (*BUILTIN, *others.whole.values())
    return {spec.name: spec for spec in specs}, others.broken


def known_backends(extra: Sequence[BackendSpec] = ()) -> dict[str, BackendSpec]:
    """By name, in a fixed order: built-in ones, entry points, then ``extra``.

    Raises ``BackendError`` when an entry point does not give a ``BackendSpec``.
    """
    specs, broken = found_backends()
    if broken:
        raise BackendError("; ".join(each.reason for each in broken))
    specs.update((spec.name, spec) for spec in extra)
    return specs


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
