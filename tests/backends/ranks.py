# SPDX-License-Identifier: Apache-2.0
"""Backends in real CPU ranks, with degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.generation import Generation, GenerationParams
from pytest_llenergy.backends.model import resolve
from pytest_llenergy.backends.transformers import spec as transformers
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.model.record import BackendInfo, Parallel
from pytest_llenergy.model.timeline import RoundTimeline
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import plan_processes
from pytest_llenergy.workers.pool import Load, RankPool
from pytest_llenergy.workers.workload import call_workload, task_workload

TINY = "random:llama-tiny"
PROMPTS = ["abc", "hello world", "x"]


def start(
    spec: BackendSpec, degrees: Parallel, pool: RankPool, model: str, **options: Any
) -> tuple[RankGroup, BackendInfo]:
    """A group of CPU ranks with a model, and what is told of it."""
    n = degrees.data * degrees.tensor
    plan = plan_processes(spec.capabilities, degrees, Lease(devices=("cpu",) * n), [0, 1], 1)
    return pool.loaded(plan, Load.of(spec, resolve(model), options))


class Ranks:
    """Ranks of transformers, to generate or to call functions in."""

    def __init__(self, degrees: Parallel, model: str = TINY) -> None:
        self.pool = RankPool(timeout_s=300)
        self.degrees, self.model = degrees, model
        try:
            self.group, self.info = start(transformers.SPEC, degrees, self.pool, model, dtype="float32")
        except BaseException:
            # The fixture has nothing yet that it could close.
            self.pool.close()
            raise

    def generate(self, prompts: Sequence[str] = PROMPTS, **params: Any) -> tuple[Generation, RoundTimeline]:
        told = GenerationParams.of({"max_new_tokens": 12, "ignore_eos": True, **params})
        workload = task_workload(self.group, prompts, told, 300)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        workload = call_workload(self.group, function, args, {}, 300)
        workload.run_round()
        return workload.results()
