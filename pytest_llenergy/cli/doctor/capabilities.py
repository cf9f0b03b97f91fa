# SPDX-License-Identifier: Apache-2.0
"""The capabilities of backends in words, the same in the terminal and in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.base import DEGREES, BackendSpec, Capabilities
from pytest_llenergy.cli.doctor.checks import Line

UNKNOWN = "not stated"

#: How the reasons and sources of refused load options begin.
REFUSED = "options_"


@dataclass(frozen=True)
class Fact:
    """A capability in words, with the name of its field and the source of the statement."""

    name: str
    title: str
    value: str
    reason: str | None = None
    source: str = UNKNOWN


def list_facts(row: Capabilities) -> Iterator[Fact]:
    """List every capability that a test can require or a reader must know, in the order of the table.

    The load options that are refused for a reason follow the others.
    """
    for name, title, value in _values(row):
        yield Fact(name, title, value, row.reasons.get(name), row.sources.get(name, UNKNOWN))
        if name == "options":
            for refused, reason in row.reasons.items():
                if refused.startswith(REFUSED):
                    option = refused.removeprefix(REFUSED)
                    yield Fact(refused, f"option {option}", "no", reason, row.sources.get(refused, UNKNOWN))


def _values(row: Capabilities) -> Iterator[tuple[str, str, str]]:
    launch = "ranks, one a device" if row.launch == "ranks" else "backend"
    yield "launch", "launch", f"{launch}, on all devices" if row.opaque else launch
    several = row.launch == "ranks" and (row.tensor or row.pipeline)
    yield "hosts", "hosts of one model", "several" if several else row.hosts
    yield "managed_by", "devices assigned by", row.managed_by
    for name, title in (("cpu", "CPU"), ("gpu", "NVIDIA GPUs"), *((each, each) for each in DEGREES)):
        yield name, title, "yes" if getattr(row, name) else "no"
    yield "tasks", "tasks", ", ".join(row.tasks) or "none"
    yield "batching", "batching", ", ".join(row.batching) or "none"
    yield "prefix_cache", "prefix cache", row.prefix_cache
    yield "caches", "key-value caches", ", ".join(row.caches) or "none"
    stamps = f"each {row.timestamps}, {'exact' if row.exact else 'not exact'}; {row.clock}"
    yield "timestamps", "timestamps", "none" if row.timestamps == "none" else stamps
    yield "options", "load options", ", ".join(row.options) or "none"
    yield "passes", "other options", row.passes or "none"
    yield "sampling", "beams, penalties", ", ".join(row.sampling) or "none"
    yield "hardware", "run on", row.hardware or "not run on hardware"


def as_primitives(spec: BackendSpec) -> dict[str, Any]:
    """Return a backend with its capabilities, why it cannot run (``missing``) and how to install it."""
    return {
        "name": spec.name,
        "missing": spec.explain_unavailable(),
        "install": spec.install,
        "managed_by": spec.capabilities.managed_by,
        "capabilities": spec.capabilities,
    }


def list_lines(spec: BackendSpec) -> Iterator[Line]:
    """List the capabilities of a backend, one per line, each with its source in brackets."""
    missing = (spec.explain_unavailable() or "installed").removeprefix(f"{spec.name} is ")
    yield Line("backend", f"{spec.name}: {missing}")
    for fact in list_facts(spec.capabilities):
        text = f"{fact.value}: {fact.reason}" if fact.reason else fact.value
        yield Line("", f"{fact.title:<22} {text} [{fact.source}]")
