# SPDX-License-Identifier: Apache-2.0
"""The backend protocol and its declared capabilities."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec

from pytest_llenergy.backends.interpreter import missing_modules
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams, Result
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import BackendInfo, Parallel
from pytest_llenergy.model.timeline import Flops

# The capability row of an engine: what it can do, and how that is known.

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


# What a backend is: an engine that loads a model and does tasks with it.


@dataclass(frozen=True)
class RankContext:
    """Where a backend finds itself: its place in the world and the devices that are its own.

    With ``launch="engine"`` these are all devices of the test, or of one replica of it, and ``parallel`` is
    what to make of them. ``cpus`` are the logical CPUs that the process is pinned to; empty means not pinned.
    ``scratch`` is a directory for files that are to go with the ranks, however these end; ``None`` outside of
    ranks.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1
    cpus: tuple[int, ...] = ()
    parallel: Parallel = field(default_factory=Parallel)
    scratch: str | None = None


class Job(Protocol):
    """One batch, ready to run any number of times.

    One that has a method ``ready`` is called by it before each round, ahead of the quiet gap.
    """

    def run(self) -> Any:
        """The measured work: nothing else belongs in here. Returns whatever ``result`` reads."""

    def result(self, outcome: Any) -> Result:
        """What one ``run`` made; counting and detokenising are done here, outside the window."""


class Backend(Protocol):
    """An engine inside a rank. Everything is called in the rank's process, in this order.

    Tasks other than ``generate`` have a method of their own beside ``prepare``; see ``backends.tasks``.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        """Load the model onto the context's device. Raises ``ModelError`` or ``BackendError``."""

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        """Do all that does not belong to the measured work, tokenisation too."""

    def synchronize(self) -> None:
        """Block until the device has finished what was queued."""

    def close(self) -> None:
        """Free the model."""


class FlopCounter(Protocol):
    """What a backend may have besides: the floating-point operations of its jobs."""

    def flops(self, job: Job, done: Result) -> Flops:
        """Those that one ``run`` of a job executes, padding included, asked for after the measured rounds.

        ``done`` is what its last run made. The job may be run again: nothing of this is in any window.
        """


class BackendWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process of an engine that starts its own, as it says itself: its pid and its place in their world.

    ``rank`` counts from 0 to ``world_size - 1`` within one replica. One that is ``attached`` ran before the
    rank did and is no child of it; its ``pid`` is 0 where that is not told.
    """

    pid: int
    rank: int
    world_size: int
    attached: bool = False


class SelfLaunchingBackend(Backend, Protocol):
    """A backend with ``launch="engine"``. What it says of its workers is held against the plan."""

    def workers(self) -> Sequence[BackendWorker]:
        """The processes that hold a part of the model, asked of themselves; the rank's own if it does."""


@dataclass(frozen=True)
class BackendSpec:
    """A backend that can be named: how to make it, what it needs, what it can do.

    ``factory`` is ``"module:Class"``, imported in the rank only. ``requires`` are modules that must be
    installed, ``install`` the command that does it. ``refuses(model)`` says why a model cannot be read.
    ``python`` is the interpreter that its ranks run in, ``None`` for pytest's own. What ``reads`` directories
    is given models of other kinds converted, by pytest's own Python where the ranks run in another.
    ``preset`` are load options that the run has given, those of a test come on top; ``needs`` is what the run
    must give first, and has not.
    """

    name: str
    factory: str
    requires: tuple[str, ...]
    install: str
    capabilities: Capabilities
    refuses: Callable[[ModelSource], str | None] = lambda _model: None
    reads: Literal["all", "directory"] = "all"
    python: str | None = None
    preset: Mapping[str, Any] = field(default_factory=dict, hash=False)
    needs: str | None = None

    def missing(self) -> str | None:
        """Why the backend cannot be used here, with the command that mends it; ``None`` if it can.

        Raises ``BackendError`` when its ``python`` is none.
        """
        if self.python is not None:
            lacking = missing_modules(self.python, self.requires, self.name)
            where, remedy = f" in {self.python}", "install what is missing into that environment"
        else:
            lacking = tuple(module for module in self.requires if not is_installed(module))
            where, remedy = "", self.install
        if lacking:
            return f"{self.name} is not available{where}: no module {', '.join(lacking)}; {remedy}"
        return f"{self.name} is not available: {self.needs}" if self.needs else None


def create_backend(factory: str) -> Backend:
    """Make a backend from ``"module:Class"``. Raises ``BackendError`` when there is none."""
    module, _, name = factory.partition(":")
    try:
        made: Backend = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {factory}: {error}") from error
    return made


def is_installed(module: str) -> bool:
    """Whether a module could be imported; nothing is, but the package that it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
