# SPDX-License-Identifier: Apache-2.0
"""The transformers backend in real ranks, with a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.backends.embedding import Embedding, EmbeddingParams
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.model import resolve
from pytest_llenergy.backends.transformers import spec as transformers
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.model.record import BackendInfo
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import call_workload, task_workload

#: The random models have one token a byte and add none: three, eleven and one.
PROMPTS = ["abc", "hello world", "x"]

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Ranks:
    """Ranks that have loaded a model."""

    group: RankGroup
    info: BackendInfo

    def generate(self, prompts: list[str], **params: Any) -> tuple[Generation, RoundTimeline]:
        """Eight tokens a prompt, whatever ends a sequence, unless told otherwise."""
        told = GenerationParams.of({"max_new_tokens": 8, "ignore_eos": True, **params})
        workload = task_workload(self.group, prompts, told, TIMEOUT_S)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline

    def embed(self, texts: list[str], **params: Any) -> Embedding:
        """A vector of each text."""
        workload = task_workload(self.group, texts, EmbeddingParams.of(params), TIMEOUT_S)
        workload.run_round()
        return Embedding.merge(workload.results())

    def ask(self, function: Callable[..., Any] | str) -> Any:
        """What a function returns in the first rank."""
        workload = call_workload(self.group, function, (), {}, TIMEOUT_S)
        workload.run_round()
        return workload.results()[0]


@contextmanager
def loaded(model: str = "random:llama-tiny", n: int = 1, **options: Any) -> Iterator[Ranks]:
    """Ranks on the CPU, in float32 unless told otherwise."""
    pool = RankPool(timeout_s=TIMEOUT_S)
    plan = plan_processes(transformers.SPEC.capabilities, None, Lease(devices=("cpu",) * n), [0, 1], 1)
    load = Load.of(transformers.SPEC, resolve(model), {"dtype": "float32", **options})
    try:
        yield Ranks(*pool.loaded(plan, load))
    finally:
        pool.close()
