# SPDX-License-Identifier: Apache-2.0
"""What a backend is: an engine that loads a model and generates, and what it is able to do."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from pytest_llenergy.backends.model import ModelSource
from pytest_llenergy.errors import BackendError
from pytest_llenergy.model.record import BackendInfo, Parallel, Primitive
from pytest_llenergy.model.timeline import RequestTimeline


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate; recorded whole.

    ``ignore_eos`` makes every sequence ``max_new_tokens`` long, which keeps the work of a benchmark
    constant. ``stop_token_ids`` end a sequence like its end-of-sequence token. ``seed`` is set anew
    before every round. ``cache`` is the kind of key-value cache. Sampling needs ``do_sample=True``.
    """

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 50
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache: Literal["dynamic", "static"] = "dynamic"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerationParams:
        """Check keyword arguments of ``generate``. Raises ``BackendError`` naming the unknown ones."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise BackendError(f"generate: unknown argument {', '.join(unknown)}; known: {known}")
        try:
            params = msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise BackendError(f"generate: {error}") from None
        for name, ok, needs in (
            ("max_new_tokens", params.max_new_tokens >= 1, "1 or more"),
            ("temperature", params.temperature > 0, "more than 0; do_sample=False is greedy"),
            ("top_p", 0 < params.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", params.top_k >= 1, "1 or more"),
            ("seed", params.seed >= 0, "0 or more"),
        ):
            if not ok:
                raise BackendError(f"generate: {name} is {getattr(params, name)}, needs {needs}")
        return params

    def primitives(self) -> dict[str, Primitive]:
        """As recorded: JSON primitives, the stop tokens joined by commas."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**values, "stop_token_ids": ",".join(map(str, self.stop_token_ids))}


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What ``generate`` returns: one entry a prompt, in the order of the prompts.

    ``token_ids`` are the output tokens as produced, without prompt and padding, with the token that
    ended the sequence. ``requests`` holds counts and times.
    """

    texts: list[str]
    token_ids: list[list[int]]
    requests: list[RequestTimeline]

    @property
    def output_tokens(self) -> int:
        """Output tokens of all sequences."""
        return sum(request.output_tokens for request in self.requests)

    @staticmethod
    def merge(parts: Sequence[Generation]) -> Generation:
        """Join what the ranks made of consecutive parts of a batch."""
        return Generation(
            texts=[text for part in parts for text in part.texts],
            token_ids=[ids for part in parts for ids in part.token_ids],
            requests=[request for part in parts for request in part.requests],
        )


@dataclass(frozen=True)
class RankContext:
    """Where a backend finds itself: its place in the world and the devices that are its own.

    With ``launch="engine"`` these are all devices of the test, and ``parallel`` is what to make of them.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1
    parallel: Parallel = field(default_factory=Parallel)


class Job(Protocol):
    """One batch, ready to run any number of times."""

    def run(self) -> Any:
        """The measured work: nothing else belongs in here. Returns whatever ``result`` reads."""

    def result(self, outcome: Any) -> Generation:
        """What one ``run`` made; counting and detokenising are done here, outside the window."""


class Backend(Protocol):
    """An engine inside a rank. Everything is called in the rank's process, in this order."""

    def load(self, model: ModelSource, options: Mapping[str, Any], context: RankContext) -> BackendInfo:
        """Load the model onto the context's device. Raises ``ModelError`` or ``BackendError``."""

    def prepare(self, prompts: Sequence[str], params: GenerationParams) -> Job:
        """Do all that does not belong to the measured work, tokenisation too."""

    def synchronize(self) -> None:
        """Block until the device has finished what was queued."""

    def close(self) -> None:
        """Free the model."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; what is not declared is refused.

    ``launch`` is ``ranks`` where the plugin starts one process for each device, ``engine`` where one process
    sees all devices and the engine starts its own. ``framework`` is checked for the right devices before the
    model is loaded; its process group is there for several ranks, and with ``process_group`` for one as well.
    ``preload`` are modules that take long to import and do nothing but that: ranks that are forked have them
    already.
    """

    launch: Literal["ranks", "engine"] = "ranks"
    framework: Literal["torch"] | None = None
    process_group: bool = False
    preload: tuple[str, ...] = ()
    data: bool = False
    tensor: bool = False
    pipeline: bool = False
    gpu: bool = False
    options: tuple[str, ...] = ()
    caches: tuple[str, ...] = ("dynamic",)
    batching: Literal["static", "continuous"] = "static"
    prefix_cache: str = "none"
    timestamps: str = "none"

    def lacks(self, parallel: Parallel) -> list[str]:
        """The kinds of parallelism that are asked for and not declared."""
        kinds = ("data", "tensor", "pipeline")
        return [kind for kind in kinds if getattr(parallel, kind) > 1 and not getattr(self, kind)]


@dataclass(frozen=True)
class BackendSpec:
    """A backend that can be named: how to make it, what it needs, what it can do.

    ``factory`` is ``"module:Class"``, imported in the rank only. ``requires`` are modules that must be
    installed, ``install`` the command that does it. ``refuses(model)`` says why a model cannot be read.
    """

    name: str
    factory: str
    requires: tuple[str, ...]
    install: str
    capabilities: Capabilities
    refuses: Callable[[ModelSource], str | None] = lambda _model: None

    def missing(self) -> str | None:
        """Why the backend cannot be used here, with the command that mends it; ``None`` if it can."""
        absent = [module for module in self.requires if not _installed(module)]
        if not absent:
            return None
        return f"{self.name} is not available: no module {', '.join(absent)}; {self.install}"


def create(factory: str) -> Backend:
    """Make a backend from ``"module:Class"``. Raises ``BackendError`` when there is none."""
    module, _, name = factory.partition(":")
    try:
        made: Backend = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {factory}: {error}") from error
    return made


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
