# SPDX-License-Identifier: Apache-2.0
"""Backends in real ranks, which are kept warm for the models of later tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_llenergy.backends import transformers
from pytest_llenergy.backends.base import BackendSpec
from pytest_llenergy.backends.models import resolve_model
from pytest_llenergy.backends.tasks import Generation, GenerationParams, Params, Result
from pytest_llenergy.backends.traffic import synthetic
from pytest_llenergy.backends.traffic.requests import Inputs
from pytest_llenergy.devices.cpu import usable_cpus
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, ProcessPlan, plan_processes
from pytest_llenergy.ranks.pool import Load, RankPool
from pytest_llenergy.ranks.workload import RankWorkload, call_workload, task_workload
from pytest_llenergy.record.record import Parallel
from pytest_llenergy.record.timeline import Timeline

if TYPE_CHECKING:
    from typing_extensions import Self

TINY = "random:llama-tiny"
#: Three, eleven and one token of the random models, whose tokens are bytes.
PROMPTS = ["abc", "hello world", "x"]

#: Two tokens of SmolLM2, 28120 and 905, and six, one per word.
SMOLLM_PROMPTS = ["hello world", "The capital of France is a"]
#: A chat prompt of 21 tokens that asks for a short answer.
SMOLLM_CHAT = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
)

#: Prompts of given numbers of tokens, which each backend writes with its own tokenizer.
TRAFFIC = synthetic(count=4, input_tokens=70, input_stdev=20, shared_prefix=0.5)
ASKED = [(request.input_tokens, 3) for request in TRAFFIC]

TIMEOUT_S = 300.0

#: What ranks with transformers import; it takes three seconds.
PRELOAD = ("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


class ForkingPool(RankPool):
    """A pool on a host that all pools share: libraries are imported once, and ranks of torch are forks."""

    host: ClassVar = LocalHost("forkserver")

    def __init__(self) -> None:
        super().__init__(TIMEOUT_S, "forkserver", "run")
        self._hosts = {LOCALHOST: self.host}

    def close(self) -> None:
        """Close the ranks; the host stays for others."""
        self._close_group()


#: Ranks without a user, by backend and plan; the latest last. Starting them and importing torch takes longer
#: than most tests.
IDLE: list[tuple[str, ProcessPlan, ForkingPool]] = []
MAX_IDLE = 2

#: Variables that each test has for itself. Ranks with those of one test could not be shared with the next.
PRIVATE = {name: os.environ.get(name) for name in ("LLENERGY_CACHE_DIR", "LLENERGY_LOCK_DIR")}


@contextmanager
def shared_environment() -> Iterator[None]:
    """Give these variables the values that they had before the first test."""
    with mock.patch.dict(os.environ):
        for name, value in PRIVATE.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield


def close_idle_ranks() -> None:
    """Close the ranks that no test uses, and what they were forked from."""
    while IDLE:
        IDLE.pop()[2].close()
    ForkingPool.host.close()


class LoadedRanks:
    """Ranks that have loaded a model, each with one thread. After the ``with`` block they are idle.

    They run on the CPU. Those of a backend that needs GPUs have GPUs that only the plan knows.

    Args:
        spec: The backend.
        model: Name of the model, as ``resolve_model`` takes it.
        degrees: Parallel degrees.
        options: Load options.
    """

    def __init__(
        self,
        spec: BackendSpec = transformers.SPEC,
        model: str | None = TINY,
        degrees: Parallel | None = None,
        **options: Any,
    ) -> None:
        self.spec, self.model, self.degrees = spec, model, degrees or Parallel()
        n = self.degrees.data * self.degrees.tensor * self.degrees.pipeline
        devices = (CPU,) * n if spec.capabilities.cpu else tuple(f"GPU-{number}" for number in range(n))
        self.plan = plan_processes(
            spec.capabilities, self.degrees, Lease(devices=devices), usable_cpus(), 1, spec.python
        )
        if spec is transformers.SPEC:
            self.plan = replace(self.plan, preload=(*self.plan.preload, *PRELOAD))
        self.pool = self._take_idle_pool() or ForkingPool()
        try:
            self.load(**options)
        except BaseException:
            self._release()
            raise

    def load(self, **options: Any) -> None:
        """Load the model with these options, replacing the loaded one."""
        load = Load(self.spec, resolve_model(self.model), options)
        with shared_environment():
            self.group, self.info = self.pool.get_loaded(self.plan, load)

    def prepare(self, inputs: Inputs, params: Params) -> RankWorkload:
        """Prepare a batch that can run any number of times."""
        return task_workload(self.group, inputs, params, TIMEOUT_S)

    def generate(self, prompts: Inputs, **params: Any) -> tuple[Generation, Timeline]:
        """Run one round: by default eight tokens per prompt, ends of sequence ignored."""
        parsed = GenerationParams.parse({"max_new_tokens": 8, "ignore_eos": True, **params})
        workload = self.prepare(prompts, parsed)
        timeline = workload.run_round()
        return Generation.merge(workload.results()), timeline

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returns in each rank."""
        workload = call_workload(self.group, function, args, {}, TIMEOUT_S)
        workload.run_round()
        return workload.results()

    def close(self) -> None:
        """End the ranks, such as those that a test has altered."""
        self.pool.close()

    def _take_idle_pool(self) -> ForkingPool | None:
        for entry in IDLE:
            if entry[:2] == (self.spec.name, self.plan):
                IDLE.remove(entry)
                return entry[2]
        return None

    def _release(self) -> None:
        if self.pool.devices:
            IDLE.append((self.spec.name, self.plan, self.pool))
            if len(IDLE) > MAX_IDLE:
                IDLE.pop(0)[2].close()
        else:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()


def counts(made: Result) -> list[tuple[int, int]]:
    """Return input and output tokens of each request."""
    return [(request.input_tokens, request.output_tokens) for request in made.requests]
