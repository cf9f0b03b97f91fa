# SPDX-License-Identifier: Apache-2.0
"""What a backend can be asked to do, each with its parameters and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_llenergy.backends.embedding import Embedding, EmbeddingParams
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.params import Params
from pytest_llenergy.backends.served import ServedLoad, ServeParams
from pytest_llenergy.model.timeline import RequestTimeline


class Result(Protocol):
    """What one run of a task made.

    It may have ``flags``, what a reader must know of it, and ``spans``, its phases where it knows them.
    """

    @property
    def requests(self) -> Sequence[RequestTimeline]:
        """Counts and times, one entry an input."""

    @staticmethod
    def merge(parts: Sequence[Any]) -> Any:
        """Join what the ranks made of consecutive parts of the inputs."""


@dataclass(frozen=True)
class Task:
    """``method`` of a backend prepares it; ``params`` are what it can be told, ``result`` what it gives."""

    name: str
    params: type[Params]
    method: str
    result: type[Result]


GENERATE = Task("generate", GenerationParams, "prepare", Generation)
EMBED = Task("embed", EmbeddingParams, "prepare_embedding", Embedding)
SERVE = Task("serve", ServeParams, "prepare_serve", ServedLoad)

TASKS = {task.name: task for task in (GENERATE, EMBED, SERVE)}
