# SPDX-License-Identifier: Apache-2.0
"""The capability row of an engine: what it can do, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pytest_llenergy.model.record import Parallel

#: The kinds of parallelism, as the degrees of ``Parallel`` are named.
Degree = Literal["data", "tensor", "pipeline", "placement"]
DEGREES: tuple[Degree, ...] = ("data", "tensor", "pipeline", "placement")


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; what is not declared is refused.

    ``launch`` is ``ranks`` where the plugin starts one process for each device, ``engine`` where one process
    sees all devices and the engine starts its own. ``replicas`` tells who makes the data-parallel copies of
    such an engine: with ``plugin`` each copy is a process with devices of its own. ``placement`` is layers of
    one model on several devices of one process, which is no parallelism: they work in turn.

    ``framework`` is checked for the right devices before the model is loaded; its process group is there for
    several ranks, and with ``process_group`` for one as well. ``preload`` are modules that take long to
    import and do nothing but that: ranks that are forked have them already.

    ``tasks`` are those of ``backends.tasks``; ``options`` the load options, ``caches`` the kinds of key-value
    cache. ``timestamps`` says of what the engine tells the time, ``exact`` whether a stamp is taken when the
    token is there, and not, say, when a batch of them arrives; ``clock`` is where they come from.

    ``changed_by`` are fields that a load option gives another value: of each option that does, by its value,
    those fields.

    ``reasons`` tell of a field why it is as it is, where a refusal should say so; ``sources`` how it is
    known: ``tested`` by this package's own tests, or an address or a file of the engine's. ``hardware`` is
    what this adapter has been run on, ``None`` where that is nothing yet.
    """

    launch: Literal["ranks", "engine"] = "ranks"
    replicas: Literal["plugin", "engine"] = "plugin"
    framework: Literal["torch"] | None = None
    process_group: bool = False
    preload: tuple[str, ...] = ()
    data: bool = False
    tensor: bool = False
    pipeline: bool = False
    placement: bool = False
    cpu: bool = True
    gpu: bool = False
    tasks: tuple[str, ...] = ("generate",)
    options: tuple[str, ...] = ()
    caches: tuple[str, ...] = ("dynamic",)
    batching: tuple[Literal["static", "continuous"], ...] = ("static",)
    prefix_cache: str = "none"
    timestamps: Literal["none", "step", "token"] = "none"
    exact: bool = False
    clock: str = "none"
    changed_by: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict, hash=False)
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    hardware: str | None = None

    @property
    def managed_by(self) -> Literal["plugin", "engine"]:
        """Who shares the devices of a process out."""
        return "plugin" if self.launch == "ranks" else "engine"

    def lacks(self, parallel: Parallel) -> list[str]:
        """The kinds of parallelism that are asked for and not declared."""
        return [kind for kind in DEGREES if getattr(parallel, kind) > 1 and not getattr(self, kind)]

    def loaded_with(self, options: Mapping[str, Any]) -> Capabilities:
        """The row of the engine with these load options."""
        changed: dict[str, Any] = {}
        for name, value in options.items():
            # A test may have given anything, also what is no key.
            if isinstance(value, str):
                changed |= self.changed_by.get(name, {}).get(value, {})
        return replace(self, **changed) if changed else self
