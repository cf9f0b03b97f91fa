# SPDX-License-Identifier: Apache-2.0
"""Registry of backends, and the check of a test's requirements against their capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from pytest_llenergy.backends import (
    llama_cpp,
    onnxruntime,
    openvino,
    server,
    transformers,
    vllm,
)
from pytest_llenergy.backends.base import BackendSpec, Capabilities
from pytest_llenergy.backends.tasks import TASKS, GenerationParams
from pytest_llenergy.errors import BackendError, PlanError
from pytest_llenergy.record.entry_points import BrokenEntryPoint, load_entry_points
from pytest_llenergy.record.record import Parallel
from pytest_llenergy.record.text import did_you_mean

BUILTIN = (
    *(transformers.SPEC, openvino.SPEC, onnxruntime.SPEC),
    *(llama_cpp.SPEC, vllm.SPEC, server.SPEC),
)
ENTRY_POINTS = "pytest_llenergy.backends"


def discover_backends() -> tuple[dict[str, BackendSpec], tuple[BrokenEntryPoint, ...]]:
    """Return built-in and entry-point backends by name, in a fixed order, and the broken entry points."""
    others = load_entry_points(ENTRY_POINTS, BackendSpec)
    specs = (*BUILTIN, *others.plugins.values())
    return {spec.name: spec for spec in specs}, others.broken


def load_backends() -> dict[str, BackendSpec]:
    """Return the installed backends by name in a fixed order: built-in, then entry points."""
    specs, broken = discover_backends()
    if broken:
        raise BackendError("; ".join(each.reason for each in broken))
    return specs


def select_backends(names: Sequence[str], specs: Mapping[str, BackendSpec]) -> list[BackendSpec]:
    """Return the named backends; without names, all that are usable here.

    If none is usable, return those that need no configuration by the run, so that tests can be skipped with a
    reason.
    """
    for name in names:
        if name not in specs:
            raise BackendError(f"unknown backend {name!r}; known: {', '.join(specs)}")
    if names:
        return [specs[name] for name in names]
    usable = [spec for spec in specs.values() if spec.explain_unavailable() is None]
    return usable or [spec for spec in specs.values() if spec.needs is None]


@dataclass(frozen=True)
class Requirements:
    """What a test requires of a backend, checked before anything is started. None means no requirement.

    Attributes:
        parallel: Degrees that the test names; None for those that the backend chooses.
        timestamps: ``step`` or ``token``. Timestamps of each token satisfy ``step`` too.
        per_host: Devices of each host, where that limits a model.
    """

    parallel: Parallel | None = None
    devices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    task: str | None = None
    cache: str | None = None
    timestamps: str | None = None
    per_host: int | None = None

    def unmet(self, row: Capabilities) -> Iterator[str]:
        """Yield each unmet requirement in words."""
        degrees = row.choose_degrees(self.parallel, self.devices)
        kinds = row.unsupported_degrees(degrees)
        if kinds:
            why = f" (with {self.devices} devices and no mark parallel(...) a test is data parallel)"
            yield f"{' and '.join(kinds)} parallelism{'' if self.parallel else why}"
        size = self.devices if row.opaque else degrees.tensor * degrees.pipeline
        if row.launch == "backend" and row.hosts == "one" and size > (self.per_host or size):
            yield f"one model over several hosts (it needs {size} devices, and a host has {self.per_host})"
        unknown = row.unknown_options(self.options)
        if unknown:
            takes = f"it takes: {', '.join(row.options) or 'none'}"
            hints = "; ".join(filter(None, (takes, did_you_mean(unknown, row.options))))
            yield f"the load option {' and '.join(unknown)} ({hints})"
        for what, required, has in (
            ("the task {}", self.task, row.tasks),
            ("a {} cache", self.cache, row.caches),
            ("timestamps of each {}", self.timestamps, (row.timestamps,)),
        ):
            # Timestamps of each token are also those of steps.
            met = required in has or (required == "step" and row.timestamps == "token")
            if required is not None and not met:
                yield f"{what.format(required)} (it has: {', '.join(has)})"


def parse_needs(**needs: str | None) -> Requirements:
    """Parse what a test needs: a task, a cache or timestamps."""
    row = get_type_hints(Capabilities)
    known: dict[str, tuple[str, ...]] = {
        "task": tuple(TASKS),
        "cache": get_args(get_type_hints(GenerationParams)["cache"]),
        "timestamps": tuple(word for word in get_args(row["timestamps"]) if word != "none"),
    }
    for name, value in needs.items():
        if value is not None and value not in known[name]:
            raise PlanError(f"{name} is {value!r}, needs one of {', '.join(known[name])}")
    if all(value is None for value in needs.values()):
        raise PlanError('needs at least one argument, such as timestamps="token"')
    return Requirements(**needs)  # type: ignore[arg-type]  # the keys of known are fields


def explain_unmet(spec: BackendSpec, required: Requirements) -> str | None:
    """Return why a backend cannot run a test; None if it can."""
    unmet = " and ".join(required.unmet(spec.capabilities))
    return f"{spec.name} does not offer {unmet}" if unmet else None


def explain_unmet_by_all(
    specs: Sequence[BackendSpec], required: Requirements, known: Mapping[str, BackendSpec]
) -> str | None:
    """Return what ``specs`` lack for a test that no backend in ``known`` can run; None if one may."""
    # Only a library that is used refuses an unknown option: a misspelt one must not skip every test.
    tried = {spec.name for spec in specs}
    rows = (
        row.capabilities if name in tried else replace(row.capabilities, passes=False)
        for name, row in known.items()
    )
    if any(not any(required.unmet(row)) for row in rows):
        return None
    return "; ".join(reason for spec in specs if (reason := explain_unmet(spec, required)))
