# SPDX-License-Identifier: Apache-2.0
"""The backend protocol: what a backend can do (``Capabilities``) and what it does (``Backend``).

To add a backend:

1. Create a module in this package, or a package whose ``__init__.py`` holds the spec.
2. Write a class with the methods of ``Backend``. Import the library inside ``load``, never at the top.
3. Return jobs from ``prepare``: ``run`` holds the measured work only, ``result`` counts and detokenises.
4. Declare a ``BackendSpec`` named ``SPEC`` with ``Capabilities``. What is not declared is refused.
5. Add ``SPEC`` to ``BUILTIN`` in ``registry.py``, or register it by entry point or hook.
6. Run ``BackendConformance`` of ``pytest_llenergy.conformance`` against it. See docs/extending.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from pytest_llenergy.backends.interpreter import missing_modules
from pytest_llenergy.backends.models import ModelSource
from pytest_llenergy.backends.tasks import GenerationParams, Result
from pytest_llenergy.errors import BackendError
from pytest_llenergy.record.record import BackendInfo, Parallel

#: Kinds of parallelism: fields of ``Parallel``.
Degree = Literal["data", "tensor", "pipeline", "placement"]
DEGREES: tuple[Degree, ...] = ("data", "tensor", "pipeline", "placement")


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Tests that need anything not declared here are refused.

    Attributes:
        launch: ``ranks`` if the plugin starts one process per device; ``backend`` if one process gets the
            devices of a replica and the library starts its own workers.
        opaque: One process gets all devices of the test and divides the work in a way that cannot be seen
            from outside, so that the test has no degrees of parallelism.
        hosts: Whether one model may be spread over several hosts, each with a rank.
        framework: Library whose visible devices are checked before the model is loaded. Its process group is
            initialised when there are several ranks.
        process_group: Initialise the process group for a single rank as well.
        preload: Modules to import before ranks are forked: slow ones, without side effects.
        placement: Layers of one model on several devices of one process, which work in turn.
        tasks: Names in ``backends.tasks.TASKS``.
        options: Names of the load options.
        passes: Whether the backend passes other options on to its library, which may refuse them.
        caches: Kinds of key-value cache.
        timestamps: ``step`` if only some tokens have a time, such as the first and the last.
    """

    launch: Literal["ranks", "backend"] = "ranks"
    opaque: bool = False
    hosts: Literal["one", "several"] = "one"
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
    passes: bool = False
    caches: tuple[str, ...] = ("dynamic",)
    timestamps: Literal["none", "step", "token"] = "none"

    def choose_degrees(self, parallel: Parallel | None, devices: int) -> Parallel:
        """Return the degrees of a test with so many devices: those of its mark, data parallel without one."""
        return parallel or (Parallel() if self.opaque else Parallel(data=devices))

    def unsupported_degrees(self, parallel: Parallel) -> list[str]:
        """Return the requested kinds of parallelism that are not declared."""
        return [kind for kind in DEGREES if getattr(parallel, kind) > 1 and not getattr(self, kind)]

    def unknown_options(self, names: Iterable[str]) -> list[str]:
        """Return the load options that are neither declared nor passed on to the library."""
        return [name for name in names if name not in self.options and not self.passes]


@dataclass(frozen=True)
class RankContext:
    """The place of a rank in the world, and its devices.

    Attributes:
        devices: The rank's devices. With ``launch="backend"``, all devices of the test or of one replica, to
            be used as ``parallel`` says.
        nodes: Over how many hosts one model is spread, each with one rank that has the devices of its host;
            see ``Capabilities.hosts``. ``node_rank`` is the position of this rank among them.
        master: Address of the host with ``node_rank`` 0 that all of them reach, and a free port of it; None
            if ``nodes`` is 1.
        threads: Number of CPU threads to use.
        cpus: Logical CPUs that the process is pinned to; empty if not pinned.
        scratch: Directory for files that are removed with the rank, however it ends; None outside of ranks.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1
    cpus: tuple[int, ...] = ()
    parallel: Parallel = field(default_factory=Parallel)
    scratch: str | None = None
    nodes: int = 1
    node_rank: int = 0
    master: tuple[str, int] | None = None


class Job(Protocol):
    """A prepared batch that can run any number of times.

    If it has a method ``before_round``, that is called before each round, ahead of the quiet gap.
    """

    def run(self) -> Any:
        """Do the measured work and nothing else. Returns whatever ``result`` reads."""

    def result(self, outcome: Any) -> Result:
        """Return the result of one ``run``. Counting and detokenising happen here, outside the window."""


class Backend(Protocol):
    """An inference library in a rank. Methods are called in the rank's process, in this order.

    Each task besides ``generate`` has its own method next to ``prepare``; see ``backends.tasks``. Optional:
    ``count_tokens(texts)`` returns the tokens of each text, as ``prepare`` would count it, so that prompts of
    a number of tokens can be written. With ``launch="backend"``, ``workers()`` returns the
    ``BackendWorker`` processes of this host that hold a part of the model.
    """

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        """Load the model onto the context's devices.

        With ``context.node_rank`` above 0, start this host's part of the model. Only ``workers``,
        ``synchronize`` and ``close`` are called then: the rank with ``node_rank`` 0 does the work.

        Raises:
            ModelError: The model cannot be read.
            BackendError: An option is invalid, or not possible in this context.
        """

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        """Do everything that is not part of the measured work, including tokenisation."""

    def synchronize(self) -> None:
        """Block until the device has finished its queued work."""

    def close(self) -> None:
        """Free the model."""


class BackendWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process in which a backend holds a part of the model, as reported by that process.

    Attributes:
        pid: Process id; 0 if unknown.
        rank: From 0 to ``world_size - 1`` within one replica, over all its hosts; the shards of a stage are
            consecutive.
        attached: The process was already running and is not a child of the rank.
        server: It stands for all processes of a server, of which each leased board must have one.
    """

    pid: int
    rank: int
    world_size: int
    attached: bool = False
    server: bool = False


@dataclass(frozen=True)
class BackendSpec:
    """A backend by name: how to create it, what it requires, what it can do.

    Attributes:
        factory: ``"module:Class"``, imported in the rank only.
        requires: Modules that must be installed.
        install: Command that installs them.
        refuses: ``refuses(model)`` returns why a model cannot be read, or None.
        reads: With ``directory``, models of other kinds are converted first; pytest's own Python converts
            them if the ranks use another one.
        python: Interpreter of its ranks; None for pytest's own.
        preset: Load options set by the run. Those of a test override them.
        needs: What the run must configure before the backend can be used; None if nothing is missing.
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

    def explain_unavailable(self) -> str | None:
        """Return why the backend cannot be used here and how to fix it; None if it can be used."""
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
    """Create a backend from ``"module:Class"``. Raises ``BackendError`` if that does not exist."""
    module, _, name = factory.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {factory}: {error}") from error
    return backend


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Imports only its parent package."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
