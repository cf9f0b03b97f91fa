# SPDX-License-Identifier: Apache-2.0
"""Every backend that can be named: built in, from entry points, from hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from pytest_llenergy.backends import openvino, transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.errors import BackendError

BUILTIN = (transformers.SPEC, openvino.SPEC)
ENTRY_POINTS = "pytest_llenergy.backends"


def known_backends(extra: Sequence[BackendSpec] = ()) -> dict[str, BackendSpec]:
    """By name, in a fixed order: built-in ones, entry points, then ``extra``.

    Raises ``BackendError`` when an entry point does not give a ``BackendSpec``.
    """
    specs = {spec.name: spec for spec in BUILTIN}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        spec = point.load()
        if not isinstance(spec, BackendSpec):
            raise BackendError(f"entry point {point.value} gives a {type(spec).__name__}, not a BackendSpec")
        specs[spec.name] = spec
    specs.update((spec.name, spec) for spec in extra)
    return specs


def select(names: Sequence[str], specs: Mapping[str, BackendSpec]) -> list[BackendSpec]:
    """The named backends, or all. Raises ``BackendError`` for an unknown name."""
    for name in names:
        if name not in specs:
            raise BackendError(f"unknown backend {name!r}; known: {', '.join(specs)}")
    return [specs[name] for name in names] or list(specs.values())
