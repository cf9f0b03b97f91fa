# SPDX-License-Identifier: Apache-2.0
"""The capabilities of backends in words, the same in the terminal and in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import DEGREES, BackendSpec, Capabilities
from pytest_llenergy.cli.doctor.checks import Line


@dataclass(frozen=True)
class Fact:
    """A capability in words, with the name of its field."""

    name: str
    title: str
    value: str


def list_facts(row: Capabilities) -> Iterator[Fact]:
    """List every capability that a test can require, in the order of the table."""
    launch = "ranks, one a device" if row.launch == "ranks" else "backend"
    yield Fact("launch", "launch", f"{launch}, on all devices" if row.opaque else launch)
    several = row.launch == "ranks" and (row.tensor or row.pipeline)
    yield Fact("hosts", "hosts of one model", "several" if several else row.hosts)
    for name, title in (("cpu", "CPU"), ("gpu", "NVIDIA GPUs"), *((each, each) for each in DEGREES)):
        yield Fact(name, title, "yes" if getattr(row, name) else "no")
    yield Fact("tasks", "tasks", ", ".join(row.tasks) or "none")
    yield Fact("caches", "key-value caches", ", ".join(row.caches) or "none")
    yield Fact("timestamps", "timestamps", row.timestamps)
    yield Fact("options", "load options", ", ".join(row.options) or "none")
    yield Fact("passes", "other options", "those of its library" if row.passes else "none")


def as_primitives(spec: BackendSpec) -> dict[str, Any]:
    """Return a backend with its capabilities, why it cannot run (``missing``) and how to install it."""
    return {
        "name": spec.name,
        "missing": spec.explain_unavailable(),
        "install": spec.install,
        "capabilities": spec.capabilities,
    }


def list_lines(spec: BackendSpec) -> Iterator[Line]:
    """List the capabilities of a backend, one per line."""
    missing = (spec.explain_unavailable() or "installed").removeprefix(f"{spec.name} is ")
    yield Line("backend", f"{spec.name}: {missing}")
    for fact in list_facts(spec.capabilities):
        yield Line("", f"{fact.title:<22} {fact.value}")
